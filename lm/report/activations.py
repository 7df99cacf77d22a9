"""What a micro-batch holds while it goes forward and back, counted on a small model of its kind.

Nothing here is a formula of an architecture: a model of two layers (of the pattern of layers,
twice), no wider than PROBE_WIDTH and on few tokens, makes a real forward and backward on the CPU,
every tensor's memory is followed, and what was counted is scaled to the run's width, depth and
tokens.

b: sequences of a micro-batch; l: tokens of each.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm.config.model import Model
from lm.config.schema import Config
from lm.kernels import available
from lm.model import blocks, cell, full_rank, scan
from lm.model.configuration_fprnn import AUTO_WINDOW
from lm.model.loss import chunked_nll_sum
from lm.model.mixer_base import MIXERS, is_built_in
from lm.model.patterns import parse
from lm.training.build import build_model, stacked

PROBE_WIDTH = 256  # d_model of the model that is counted on, at most
PROBE_VOCABULARY = 8
# (b, l) counted at: as many as `_terms` has, and all different in them. Two with few tokens, two
# with more: of few tokens the most that lives is made of weights, of more of activations.
PROBES = ((1, 64), (1, 128), (1, 256), (2, 256), (2, 64))


class Live(TorchDispatchMode):
    """Inside, `bytes` are those of all tensors made inside that still live, and `peak` the most
    that they were since it was last set. What an operation allocates and frees itself is not seen.

    Args: known: tensors that were there before; their memory, and views of it, do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.bytes = self.peak = 0
        self._living: dict[int, weakref.ref] = {}  # id of a storage → its weak reference
        for tensor in known:
            self._enter(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._living:
                    self._enter(storage, storage.nbytes())
        return result

    def _enter(self, storage, size):
        key = storage._cdata

        def leave(_):
            self.bytes -= size
            del self._living[key]

        self._living[key] = weakref.ref(storage, leave)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


class Held(NamedTuple):
    """Bytes of one micro-batch, weights and their gradients left out."""

    kept: float  # by the forward, for the backward
    temporary: float  # the most above that, in the forward of a layer, its solve, or its backward


class _Fit(NamedTuple):
    """A number of bytes as a sum over `_terms`."""

    coefficients: tuple[float, ...]

    def at(self, batch, length):
        return sum(c * t for c, t in zip(self.coefficients, _terms(batch, length)))


class _Lines(NamedTuple):
    """The most of several numbers of bytes, each of which is a line in the number of tokens."""

    lines: tuple[tuple[float, float], ...]  # (at no token, a token)

    def at(self, batch, length):
        return max(start + slope * batch * length for start, slope in self.lines)


class Activations(NamedTuple):
    """What micro-batches of any size hold."""

    repeats: int  # of the pattern of layers, which is one layer where all are equal
    once: _Fit  # kept by embedding and final norm
    layers: _Fit  # by the pattern once
    temporary: _Lines

    def held(self, batch: int, length: int) -> Held:
        kept = self.once.at(batch, length) + self.repeats * self.layers.at(batch, length)
        return Held(max(0.0, kept), max(0.0, self.temporary.at(batch, length)))


def _terms(batch, length):
    """What bytes are proportional to: nothing, sequences, the length (a matrix that every step of a
    loop over time casts again), tokens, chunks of the scans."""
    return 1, batch, length, batch * length, batch * _chunks(length)


def _chunks(length):
    """Chunks that the scans cut a sequence into."""
    every = 1 << math.ceil(math.log2(max(1.0, length**0.5)))
    return -(-length // every)


def for_gpu(cfg: Config) -> Config:
    """The config with the schedule that `auto` is on a GPU (lm/model/fixed_point.py, `width`)."""
    solver = cfg.solver.settled()
    if cfg.model.name != "fprnn" or solver["token"] != "exact" or solver["schedule"] != "auto":
        return cfg
    copy = cfg.model_copy(deep=True)
    copy.solver.schedule = f"window:{AUTO_WINDOW}"
    return copy


def count(cfg: Config, on_gpu: bool) -> Activations:
    """Count on small models; a second or a few.

    Args:
        on_gpu: count the way that a GPU goes. Its scans hold what ours in Triton do; the rest of
        an iteration is counted as plain PyTorch, whose fused kernels hold less. Else the way of
        this CPU, with its kernels.
    """
    cfg = cfg.model_copy(update={"model": stacked(cfg.model)})
    small, wider = _narrowed(cfg.model)
    few = _counted_config(cfg, small, on_gpu)
    tokens = cfg.train.micro_batch_size * cfg.data.seq_len
    found = []
    if not on_gpu:
        available("cpu")  # what tries the kernels out shall not be counted
    with contextlib.ExitStack() as inside:
        if on_gpu:
            inside.enter_context(_scans_of_a_gpu())
        inside.enter_context(_set(cell, find_root=_taken_for_solved))
        few_steps = {"MOST_PICARD": 2, "MOST_ACCELERATED": 0, "MOST_DENSE": 0}
        inside.enter_context(_set(full_rank, **few_steps))
        inside.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # what is solved here is not used
        most = scan.MAX_TEMPORARY
        for batch, length in PROBES:
            # Few tokens under a cap as much lower hold what many do under the real one, by token.
            cap = int(max(1, most * batch * length / (tokens * wider)))
            with _set(scan, MAX_TEMPORARY=0 if on_gpu else cap):
                found.append(_held_by(few, batch, length))
    once, layer, temporary = zip(*found)
    return Activations(
        cfg.model.n_layer // _pattern(cfg.model),
        _fit(once, wider),
        _fit(layer, wider),
        _lines(temporary, wider),
    )


def _pattern(model: Model) -> int:
    """Layers after which they come again."""
    if model.layers is None:
        return 1
    layers = parse(model.layers, model.n_layer)
    return next(
        n
        for n in range(1, len(layers) + 1)
        if len(layers) % n == 0 and layers == layers[:n] * (len(layers) // n)
    )


def _narrowed(model: Model) -> tuple[Model, int]:
    """A model at most PROBE_WIDTH wide with the same per-channel sizes, and how many times wider
    the real one is. A width that no power of two divides so far stays wider."""
    copy, wider = model.model_copy(deep=True), 1
    while copy.d_model > PROBE_WIDTH and _can_be_halved(copy):
        copy.d_model //= 2
        wider *= 2
        for name in ("dt_rank", "mixer_proj_rank", "d_ff", "n_heads"):
            value = getattr(copy, name)
            if isinstance(value, int):
                setattr(copy, name, value // 2)
    return copy, wider


def _can_be_halved(model: Model) -> bool:
    if model.layers is not None and not _is_plain(model):
        return False
    if model.mixer not in MIXERS or not is_built_in(MIXERS[model.mixer]):
        return False  # a mixer of one's own may have no such size
    sizes = [model.d_model, *(getattr(model, name) for name in ("mixer_proj_rank", "d_ff"))]
    sizes += [model.dt_rank, model.n_heads]
    halves = all(size % 2 == 0 for size in sizes if isinstance(size, int))
    heads = model.expand * model.d_model // 2 % (model.headdim * model.ngroups) == 0
    ranks = model.mixer != "monarch" or model.expand * model.d_model // 2 % model.mixer_rank == 0
    return halves and ranks and (heads or (model.name, model.block) == ("fprnn", "fp_mamba1"))


def _is_plain(model: Model) -> bool:
    """Whether no layer of the pattern has sizes of its own, or a width that heads must divide."""
    layers = parse(model.layers, model.n_layer)
    free = ("fp_mamba1", "fp_rnn", "mamba", "mlp")
    return all(layer.kind in free and not layer.options for layer in layers)


def _counted_config(cfg: Config, small: Model, on_gpu: bool) -> Config:
    """The config to count with: few iterations, as what is held does not depend on their number."""
    few = (for_gpu(cfg) if on_gpu else cfg).model_copy(deep=True)
    few.model = small
    few.model.n_layer = 2 * _pattern(small)
    if small.layers is not None:
        first = parse(small.layers, small.n_layer)[: _pattern(small)]
        few.model.layers = [{layer.kind: layer.options} for layer in first]
    few.solver.max_iters = 2
    schedule, low_rank = few.solver.schedule, small.mixer in ("householder", "dplr")
    by_windows = schedule not in ("sequential", "auto") or (schedule == "auto" and not low_rank)
    if few.solver.settled()["gradient"] == "exact" and by_windows:
        few.solver.gradient = "adjoint:2"  # the same, with fewer terms
    return few


@contextlib.contextmanager
def _set(module, **names):
    """Inside, these names of a module are something else."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _taken_for_solved(coefficients):
    """In the place of cell.find_root: hundreds of small operations less, of which nothing is kept.
    (The compiled solve of a CPU is as it is, and y itself is iterated twice.)"""
    alpha = coefficients.alpha
    return torch.zeros_like(alpha), torch.zeros_like(alpha[:, 0], dtype=torch.uint8)


@contextlib.contextmanager
def _scans_of_a_gpu():
    """Inside, everything but the scans is computed in plain PyTorch, and these hold what those of
    lm/kernels/triton/scan.py and triton_ssd.py do, without computing anything."""
    before = os.environ.get("FPRNN_KERNELS")
    os.environ["FPRNN_KERNELS"] = "plain"
    try:
        with (
            _set(scan, selective_scan_plain=_selective_scan),
            _set(blocks, ssd_scan=_ssd_scan, ssd_decays=lambda *_: None),
        ):
            yield
    finally:
        del os.environ["FPRNN_KERNELS"]
        if before is not None:
            os.environ["FPRNN_KERNELS"] = before


class _ScanThatHolds(torch.autograd.Function):
    """A scan in fp32 that makes and keeps what a kernel does: its inputs, and states between
    chunks, twice the size while they are made."""

    @staticmethod
    def forward(ctx, states, final, *inputs):
        made = inputs[0].new_zeros(2, *states)
        ctx.save_for_backward(*inputs, made[0].clone() if math.prod(states) else None)
        del made
        return inputs[0].new_zeros(inputs[0].shape), inputs[0].new_zeros(final)

    @staticmethod
    def backward(ctx, *_):
        *inputs, _ = ctx.saved_tensors
        return None, None, *(None if t is None else torch.zeros_like(t) for t in inputs)


def _selective_scan(x, dt, A, B, C, h0=None, keep=None, decays=None):
    batch, length, d = x.shape
    states = (batch, _chunks(length), A.shape[1], d)
    return _ScanThatHolds.apply(states, (batch, *A.shape), x, dt, A, B, C)


def _ssd_scan(x, dt, A, B, C, h0=None, keep=None, decays=None):
    x, dt, A, B, C = scan._same_dtype(x, dt, A, B, C)
    batch, _, heads, wide = x.shape
    return _ScanThatHolds.apply((0,), (batch, heads, wide, B.shape[-1]), x, dt, A, B, C)


def _held_by(cfg: Config, batch: int, length: int) -> tuple[float, float, float]:
    """Bytes held by a real micro-batch of random tokens through the pattern of layers twice: kept
    by what is around the layers, kept by the second time, and the most above all that is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(cfg, PROBE_VOCABULARY).train()
        ids = torch.randint(0, PROBE_VOCABULARY, (batch, length))
    if cfg.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # gradients are counted by themselves
    known = [ids, *model.buffers(), *model.parameters(), *(p.grad for p in model.parameters())]
    bf16 = cfg.train.precision == "bf16"
    after = []  # each layer
    with Live(known) as live:
        for layer in _layers(model, cfg.model.n_layer):
            layer.register_forward_hook(lambda *_: after.append(live.bytes))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids, shift_labels=ids, loss_only=True).loss
        kept, once = live.bytes, len(after) // 2
        first, second = after[once - 1], after[2 * once - 1]
        loss.backward()
    layers = second - first
    return kept - 2 * layers, layers, live.peak - kept


def _layers(model, count):
    """The model's layers: its first list of so many modules."""
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    return next(found for found in lists if len(found) == count)


def _fit(values, wider) -> _Fit:
    """Through the values at PROBES, of a model `wider` times as wide: what belongs to no
    sequence is a matrix of the weights', and grows with the square."""
    matrix = torch.tensor([_terms(*size) for size in PROBES], dtype=torch.float64)
    solved = torch.linalg.solve(matrix, torch.tensor(values, dtype=torch.float64)).tolist()
    powers = 2, 1, 2, 1, 1
    return _Fit(tuple(c * wider**power for c, power in zip(solved, powers)))


def _lines(values, wider) -> _Lines:
    """Through the first two of PROBES and through the next two. The most that lives is the largest
    of what lives at each moment, and that is a line; so it is above both."""
    lines = []
    for (at, value), (later_at, later) in zip(*[iter(zip(PROBES, values))] * 2):
        few, more = math.prod(at), math.prod(later_at)
        slope = max(0.0, (later - value) / (more - few))
        start = max(0.0, value - slope * few)
        lines.append((start * wider**2, slope * wider))
    return _Lines(tuple(lines))


def loss_bytes(cfg: Config, tokens: int, vocab_size: int) -> float:
    """Of head and loss: the most bytes that forward and backward hold at once. Counted on a small
    head, LOSS_CHUNK_TOKENS tokens at a time."""
    from lm.model.modeling_fprnn import LOSS_CHUNK_TOKENS

    few, words = 64, 512
    head = torch.nn.Linear(PROBE_VOCABULARY, words, bias=False)
    hidden = torch.ones(1, few, PROBE_VOCABULARY, requires_grad=True)
    targets = torch.zeros(1, few, dtype=torch.long)
    bf16 = cfg.train.precision == "bf16"
    with Live([head.weight, hidden, targets]) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            sums = chunked_nll_sum(head, hidden, targets, few, cfg.train.z_loss > 0)
            loss = sum(sums) if cfg.train.z_loss else sums
        loss.backward()
    return live.peak / (few * words) * min(tokens, LOSS_CHUNK_TOKENS) * vocab_size
