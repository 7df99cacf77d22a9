"""Count the bytes that the operators of a layer read and write in a training pass, in bf16.

python -m benchmarks.traffic [--rank 1 --operators]

The layers run on a CPU along the path of a GPU, but the recurrence itself costs nothing. An
operator counts with the bytes of its inputs and outputs, a view with none. Passes over two lengths
separate the bytes per token from the bytes per pass.
"""

import argparse
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import print_table
from lm.model import blocks, diagonal, layers, strategies
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

D_MODEL = 768  # of the 160M model
LENGTHS = 101, 211  # tokens; operators of both passes are matched by their shapes
KINDS = {"FP-Mamba": "fp_mamba1", "Mamba": "mamba"}  # name → layer
CELL_INPUTS = "raw", "weight_y", "dt", "A", "D", "norm_weight", "norm_bias"  # with a gradient


class Traffic(TorchDispatchMode):
    """Mode that adds the bytes of every operator to `counts`, {(phase, operator): bytes}."""

    def __init__(self, length: int):
        super().__init__()
        self.counts: Counter = Counter()
        self.phase, self.length = "forward", length

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in inputs}
        is_view = any(t.untyped_storage().data_ptr() in storages for t in outputs)
        if (is_view and not operator._schema.is_mutable) or "empty" in name:
            return result
        shape = ["l" if size == self.length else str(size) for t in outputs[:1] for size in t.shape]
        # An operator new_… reads only the dtype of its input.
        tensors = outputs if name.startswith("new_") else [*inputs, *outputs]
        size = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)
        self.counts[self.phase, f"{name} {'×'.join(shape)}"] += size
        return result


class FreeRecurrence(torch.autograd.Function):
    """Output like x (b,l,d) with gradients for all inputs; nothing is computed."""

    @staticmethod
    def forward(ctx, x, *inputs):
        ctx.formats = [(t.shape, t.dtype) for t in (x, *inputs)]
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.formats)


def try_free_kernel(operation, function, like, *args):
    """Replace `try_kernel`: a cell that costs nothing; no other kernels."""
    if operation != "cell":
        return None
    arguments = args[0]
    y = FreeRecurrence.apply(arguments["x"], *(arguments[name] for name in CELL_INPUTS))
    return y, y.new_empty(len(y), 1), torch.empty(y.shape[:2], dtype=torch.uint8).zero_()


def count_bytes(kind: str, length: int, rank: int = 1) -> Counter:
    """Return {(phase, operator): bytes} of a layer's training pass over one sequence."""
    fields = dict(vocab_size=8, d_model=D_MODEL, n_layer=1, mixer_rank=rank, layers=kind)
    block = FPRNNForCausalLM(FPRNNConfig(**fields)).train().backbone.layers[0].block
    u = torch.randn(1, length, D_MODEL, dtype=torch.bfloat16, requires_grad=True)
    kernel = SimpleNamespace(NARROW=True, CENTROIDS=False)

    def scan_freely(x, *inputs):
        return FreeRecurrence.apply(x, *inputs[:4]), None  # no state

    with (
        mock.patch.object(layers, "is_on_cpu", lambda x: False),
        mock.patch.object(layers, "try_kernel", try_free_kernel),
        mock.patch.object(blocks, "try_kernel", try_free_kernel),
        mock.patch.multiple(diagonal, try_kernel=try_free_kernel, selective_scan=scan_freely),
        mock.patch.object(strategies, "find_kernel", lambda block, like: kernel),
        Traffic(length) as traffic,
    ):
        with torch.autocast("cpu", torch.bfloat16):
            out = block(u)[0]
        traffic.phase = "backward"
        out.backward(torch.empty_like(out))
    return traffic.counts


def make_row(label: str, sizes: list[int]) -> dict[str, str]:
    """Return a row of the table from the bytes of a pass over each of LENGTHS."""
    per_token = (sizes[1] - sizes[0]) / (LENGTHS[1] - LENGTHS[0])
    per_pass = (sizes[0] - per_token * LENGTHS[0]) / 2**20
    cells = label, f"{per_token / 2**10:,.1f}", f"{per_pass:,.1f}"
    return dict(zip(("", "KiB per token", "MiB per pass"), cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=1, help="number of reflections")
    parser.add_argument("--operators", action="store_true", help="print a row per operator")
    args = parser.parse_args()
    rows = []
    for name, kind in KINDS.items():
        counts = [count_bytes(kind, length, args.rank) for length in LENGTHS]
        for phase in ("forward", "backward"):
            keys = [key for key in counts[0] | counts[1] if key[0] == phase]
            sizes = [sum(count[key] for key in keys) for count in counts]
            rows.append(make_row(f"{name}, {phase}", sizes))
            if args.operators:
                rows += [make_row(f"… {key[1]}", [count[key] for count in counts]) for key in keys]
    print_table("Bytes that operators read and write, without the recurrence", rows)


if __name__ == "__main__":
    main()
