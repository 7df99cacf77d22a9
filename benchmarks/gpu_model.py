"""What a layer costs on a GPU, predicted on a CPU: its operations, launches and bytes, counted.

python -m benchmarks.gpu_model [--batches 1,16,64 --length 2048 --d-model 768 --json FILE]

The layer's own code runs forward and backward in training mode, in bf16, on tensors without numbers
and with kernels that are not launched. An operation takes the longest of its bytes, its FLOPs and
its launch; a token of the exact recurrence takes what lm/common/cards.py says of its four nodes
of a CUDA graph. No card has measured the constants. It takes seconds, and no GPU.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # so that Triton's modules take a CPU's tensors

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.contenders import EXACT_FIELDS, PAPER_FIELDS
from benchmarks.harness import numbers, ratio, show
from lm import kernels
from lm.common.cards import SEQUENCE_S, TOKEN_S
from lm.kernels.triton import cell, roots, scan, tokens
from lm.model import layers, solver
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

KERNELS = {"selective_scan": scan, "roots": roots, "cell": cell, "tokens": tokens}
EVALUATIONS = 10  # of the paper's procedure; the paper reports fewer in training
EASY, TERMS = 6, 4  # of the exact layer on text: evaluations to 1e-2, and terms of its adjoint
WINDOW = 128
SHARES = {"forward_launches": 1 / 2, "backward_launches": 1 / 2}  # of a token's time


class Rates(NamedTuple):
    """What a card reaches."""

    name: str
    bytes_s: float
    bf16: float  # FLOP/s of products
    fp32: float
    operation_s: float = 6e-6  # of PyTorch's small operations
    launch_s: float = 30e-6  # of a Triton kernel from Python
    token_s: float = TOKEN_S
    sequence_s: float = SEQUENCE_S

    def of_token(self, sequences: int) -> float:
        """Seconds of a token of the exact recurrence, forward and backward."""
        return self.token_s + self.sequence_s * sequences


# An A100's are assumed, an H100's measured (results/gpu_h100.json).
CARDS = [
    Rates("A100", 1.4e12, 200e12, 17e12),
    Rates("H100", 2.9e12, 706e12, 48e12, operation_s=8.8e-6, launch_s=44e-6),
]


class Operation(NamedTuple):
    """One that the device does, as far as its time depends on it."""

    name: str
    bytes: float
    flops: float
    dtype: torch.dtype
    is_triton: bool = False

    def seconds(self, on: Rates) -> float:
        rate = on.bf16 if self.dtype == torch.bfloat16 else on.fp32
        launch_s = on.launch_s if self.is_triton else on.operation_s
        return max(self.bytes / on.bytes_s, self.flops / rate, launch_s)


class Cost(NamedTuple):
    """Of a part of a layer."""

    operations: float  # all but the nodes of a graph
    launches: float  # those of them that are Triton's
    nodes: float  # of a CUDA graph
    syncs: float  # the host waits for the device
    bytes: float
    seconds: dict[str, float]  # by card

    def combined(self, other: "Cost", times: float) -> "Cost":
        """This and so many of the other."""
        first = (a + times * b for a, b in zip(self[:-1], other[:-1]))
        seconds = {card: s + times * other.seconds[card] for card, s in self.seconds.items()}
        return Cost(*first, seconds)  # type: ignore[arg-type]

    def __sub__(self, other: "Cost") -> "Cost":
        return self.combined(other, -1.0)

    def __mul__(self, times: float) -> "Cost":
        return self.combined(self, times - 1.0)


def _bytes(t: torch.Tensor) -> int:
    """That are read of a tensor or written: what is expanded counts once."""
    wide = (size for size, stride in zip(t.shape, t.stride()) if stride)
    return math.prod(wide) * t.element_size() if t.numel() else 0


class Counter(TorchDispatchMode):
    """Counts what is done inside."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Operation] = []
        self.nodes = self.syncs = 0
        self.tokens: list[tuple[float, int]] = []  # of the recurrence, and their sequences

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs or {}))
        made = _tensors(out)
        storages = {t.untyped_storage()._cdata for t in given}
        writes = func._schema.is_mutable
        is_view = not writes and all(t.untyped_storage()._cdata in storages for t in made)
        name = func.overloadpacket.__name__
        if is_view or name.startswith(("empty", "new_empty")):
            return out
        if name.startswith("new_") or name.endswith("_like"):
            given = []  # it is not read
        flops = 0
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            flops = formula(*args, **(kwargs or {}), out_val=out)
        moved = sum(map(_bytes, given)) + sum(map(_bytes, made))
        self.done.append(Operation(name, moved, flops, made[0].dtype))
        return out

    def launch(self, kernel: Any, programs: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Instead of `triton.build.launch`."""
        moved = sum(map(_bytes, _tensors((args, kwargs))))
        self.done.append(Operation(kernel.__name__, moved, 0, torch.float32, True))

    def run(self, direction: Callable, plan: Any, sizes: Any, tensors: Any, firsts: range) -> None:
        """Instead of `triton.cell._run`."""
        self.nodes += len(direction(plan)) * len(list(firsts))
        self.tokens.append((SHARES.get(direction.__name__, 0.0) * sizes.length, sizes.b))

    def cost(self) -> Cost:
        seconds = {
            on.name: sum(one.seconds(on) for one in self.done)
            + sum(count * on.of_token(sequences) for count, sequences in self.tokens)
            for on in CARDS
        }
        launches = sum(one.is_triton for one in self.done)
        moved = sum(one.bytes for one in self.done)
        return Cost(len(self.done), launches, self.nodes, self.syncs, moved, seconds)


def _tensors(found: object) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        return [t for part in found for t in _tensors(part)]
    return []


@contextlib.contextmanager
def counted(evaluations: int = 1, terms: int = 1) -> Iterator[Counter]:
    """A Counter in place of the device. A solve ends after so many evaluations, the sum of an
    adjoint after so many terms."""
    counter, asked = Counter(), iter(range(terms, 0, -1))

    def read(residual, iteration, *flags):
        counter.syncs += 1
        done = iteration >= evaluations
        return [not done, True] if len(flags) == 2 else [done]

    def ended(tensor):
        counter.syncs += 1
        return next(asked) == 1

    with contextlib.ExitStack() as stack:
        for module in (scan, roots, tokens):
            stack.enter_context(mock.patch.object(module, "launch", counter.launch))
        for owner, name, stand_in in (
            (kernels, "_find", lambda name, *_: (KERNELS[name],) if name in KERNELS else ()),
            (cell, "_run", counter.run),
            (cell, "_aligned", lambda t: None if t is None else t.contiguous()),  # no address
            (layers, "on_cpu", lambda x: False),
            (solver, "_read", read),
            (torch.Tensor, "__bool__", ended),
            (torch, "quantile", lambda t, _: t.amax()),  # that of torch 2.11 looks at numbers
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield stack.enter_context(counter)


class Layer:
    """One layer of a model and its input, without numbers."""

    def __init__(self, d_model: int, rank: int, batch: int, length: int, **fields: Any) -> None:
        options = dict(vocab_size=64, d_model=d_model, n_layer=1, mixer_rank=rank, **fields)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            model = FPRNNForCausalLM(FPRNNConfig(**options)).train()
            self.u = torch.empty(batch, length, d_model, dtype=torch.bfloat16)
            self.u.requires_grad_()
        self.block = model.backbone.layers[0].block
        self.d_vec = 4 * 2 * d_model * batch * length  # bytes

    def prepare(self) -> Cost:
        with self.mode, counted() as counter, torch.no_grad(), _bf16():
            self.block.prepare(self.u)
        return counter.cost()

    def cost(self, evaluations: int = 1, terms: int = 1, backward: bool = True) -> Cost:
        """Forward, and backward."""
        self.block.zero_grad()
        self.u.grad = None
        given = counted(evaluations, terms)
        with self.mode, given as counter, torch.set_grad_enabled(backward):
            with _bf16():
                out = self.block(self.u)[0]
            if backward:
                out.backward(torch.empty_like(out))
        return counter.cost()


def _bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Procedure(NamedTuple):
    """A layer's costs: of an evaluation, of a term, and of all the rest."""

    evaluation: Cost
    term: Cost | None
    rest: Cost

    def layer(self, evaluations: float, terms: float = 0.0) -> Cost:
        whole = self.rest.combined(self.evaluation, evaluations)
        return whole if self.term is None else whole.combined(self.term, terms)


def procedure(layer: Layer, adjoint: bool, backward: bool = True) -> Procedure:
    """From runs that differ in one evaluation, or in one term."""
    once = layer.cost(backward=backward)
    evaluation = layer.cost(evaluations=2, backward=backward) - once
    term = layer.cost(terms=2) - once if adjoint and backward else None
    rest = once - evaluation
    return Procedure(evaluation, term, rest if term is None else rest - term)


class Predicted(NamedTuple):
    """Of one batch."""

    parts: dict[str, Cost]
    layers: dict[str, Cost]  # forward and backward
    forwards: dict[str, Cost]
    d_vec: float


def predict(d_model: int, rank: int, batch: int, length: int) -> Predicted:
    """The parts of a layer and whole layers, forward and backward in training."""
    sizes = d_model, rank, batch, length
    papers = Layer(*sizes, **PAPER_FIELDS)
    parallel = Layer(*sizes, **{**EXACT_FIELDS, "schedule": "parallel"})
    windows = Layer(*sizes, **{**EXACT_FIELDS, "schedule": f"window:{WINDOW}"})
    by_token = Layer(*sizes, **{**EXACT_FIELDS, "schedule": "sequential"})
    mamba = Layer(*sizes, layers="mamba")
    paper, exact = procedure(papers, False), procedure(parallel, True)
    width = max(1, length // WINDOW)
    in_windows = procedure(windows, True)
    easily = procedure(parallel, True, backward=False)
    parts = {
        "prepare": papers.prepare(),
        "paper's: an evaluation": paper.evaluation,
        "paper's: the last evaluation, backward": paper.rest - papers.prepare(),
        "F: an evaluation, all tokens at once": exact.evaluation,
        f"F: an evaluation of window:{WINDOW}": in_windows.evaluation * (1 / width),
        "F: a term of the adjoint": exact.term,
        "F: all else, backward": exact.rest - papers.prepare(),
    }
    layers = {
        f"paper's, {EVALUATIONS} evaluations": paper.layer(EVALUATIONS),
        f"exact, parallel, {EASY} evaluations, {TERMS} terms": exact.layer(EASY, TERMS),
        f"exact, window:{WINDOW}, {EASY} evaluations, {TERMS} terms": in_windows.layer(EASY, TERMS),
        "exact, token by token: what auto is": by_token.cost(),
        "Mamba, our scan": mamba.cost(),
    }
    forwards = {
        f"exact, parallel, {EASY} evaluations": easily.layer(EASY),
        f"exact, parallel, {length} evaluations: tracking state": easily.layer(length),
        "exact, token by token: what auto is": by_token.cost(backward=False),
    }
    return Predicted(parts, layers, forwards, papers.d_vec)


def row(name: str, cost: Cost, d_vec: float) -> dict[str, str]:
    """Of the table."""
    return {
        "": name,
        "operations (Triton)": f"{cost.operations:,.0f} ({cost.launches:,.0f})",
        "nodes": f"{cost.nodes:,.0f}" if cost.nodes else "–",
        "host waits": f"{cost.syncs:,.0f}" if cost.syncs else "–",
        "d-vec a token": f"{cost.bytes / d_vec:,.0f}",
        **{f"{card}, ms": f"{s * 1e3:,.2f}" for card, s in cost.seconds.items()},
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--batches", type=numbers, default=[1, 16, 64], help="default: 1,16,64")
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--d-model", type=int, default=768)
    p.add_argument("--rank", type=int, default=1, help="reflections (default: 1)")
    p.add_argument("--rates", type=json.loads, help="a JSON object: of one more card, the first")
    p.add_argument("--json", type=Path, help="also write the numbers here")
    a = p.parse_args()
    if a.rates:
        CARDS.insert(0, Rates(**a.rates))
    record: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(a).items()}, "batches": {}}
    for batch in a.batches:
        found = predict(a.d_model, a.rank, batch, a.length)
        of_all = f"{batch} × {a.length:,} tokens, d_model {a.d_model}, {a.rank} reflections, bf16"
        rows = [row(name, cost, found.d_vec) for name, cost in found.parts.items()]
        show(f"\nOf a layer, {of_all}: forward and backward, predicted", rows)
        rows = [row(name, cost, found.d_vec) for name, cost in found.layers.items()]
        show("Whole layers", rows)
        rows = [row(name, cost, found.d_vec) for name, cost in found.forwards.items()]
        show("Whole layers, forward alone", rows)
        papers, *_, by_token, mamba = (c.seconds[CARDS[0].name] for c in found.layers.values())
        print(
            f"token by token, {CARDS[0].name}: {ratio(papers, by_token)} as fast as the paper's,"
            f" {ratio(mamba, by_token)} as Mamba"
        )
        record["batches"][batch] = {
            group: {name: cost._asdict() for name, cost in costs.items()}
            for group, costs in found._asdict().items()
            if group != "d_vec"
        }
    if a.json:
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
