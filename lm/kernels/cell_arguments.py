"""The exact token, a layer's whole solve: what its compiled versions are given, checked.

Shape suffixes: b batch, l length, d channels, n states, r reflections, K columns of raw, k those of
them that read sh(y).

Token t, given y_{t−1} and h_{t−1} (docs/model.md derives it):

    row = raw_t + [W_y y_{t−1}, 0]                  u_i = nrm(act(·)), a, B, C: parts of the row
          (through centroids: W_y Σ_i α_i c_i, α = softmax(keys (y_{t−1} + noise) + key_bias))
    M v = Σ_i u_i (T U v)_i                         T from a: householder or dplr
    v(s) = g ⊙ (exp(dt A) h_{t−1} C + γ ⊙ x̃(s))     x̃(s) = x + Σ_i u_i (T (s − U x))_i
    s = U norm(v(s)): r equations; y_t = norm(v(s))  γ = dt (B·C) + D
    h_t = exp(dt A) h_{t−1} + (dt ⊙ x̃) Bᵀ           of the s that was found

The gradient is backpropagation through that recurrence, with the implicit function theorem in the
token.
"""

import functools
from typing import NamedTuple

from torch import Tensor

from lm.kernels import Unsupported

MOST_REFLECTIONS = 8
MOST_ENTRIES = 65_536  # of a token's vectors, which one program of a GPU holds
NORMS = ("layer", "rms", "none")
ACTS = ("silu", "relu", "identity")


class Layout(NamedTuple):
    """The first column of each part within a row of raw."""

    vectors: int  # r·d columns: the vectors before act and nrm, the i-th at vectors + i·d
    gates: int  # r columns: before the sigmoid
    B: int = 0  # groups·n columns
    C: int = 0


class Options(NamedTuple):
    """What a token computes."""

    rank: int
    scale: float  # of the gates: 2 for eigenvalues in [−1, 1], 1 for [0, 1]
    act: str  # "silu", "relu" or "identity", of the vectors
    sequential: bool  # householder; else dplr
    eps: float  # the least that a vector is divided by
    contractive: float | None  # κ: T is scaled by κ / max(κ, Σ a)
    bc_norm: bool
    groups: int  # of B and C
    norm: str  # "layer", "rms" or "none"
    norm_eps: float
    states: int = 0  # n of FP-Mamba-2; 0: B and C reach to the next part of the row


class Readout(NamedTuple):
    """The k centroids through which y_{t−1} is read, as lm/model/layers.py has them."""

    keys: Tensor  # (k,d)
    key_bias: Tensor  # (k,)
    values: Tensor  # (k,d)
    noise: Tensor | None  # (b,l,d)


class Sizes(NamedTuple):
    """What the shapes of the arguments say."""

    kind: str  # "mamba1", "mamba2" or "rnn"
    b: int
    length: int
    d: int
    n: int
    heads: int
    columns: int  # K
    reading: int  # k


@functools.lru_cache(1024)
def shapes_of(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Of every argument that is a tensor, in the order of `cell`'s."""
    b, d, tokens = sizes.b, sizes.d, (sizes.b, sizes.length, sizes.d)
    steps = (b, sizes.length, sizes.heads) if sizes.kind == "mamba2" else tokens
    rates = {"mamba1": (d, sizes.n), "mamba2": (sizes.heads,), "rnn": tokens}
    states = {"mamba1": (b, d, sizes.n), "mamba2": (b, sizes.heads, d // sizes.heads, sizes.n)}
    return {
        "raw": (b, sizes.length, sizes.columns),
        "weight_y": (sizes.reading, d),
        "x": tokens,
        "dt": steps,
        "A": rates[sizes.kind],
        "keep": (b, sizes.length),
        "gate": tokens,
        "D": (d,),
        "norm_weight": (d,),
        "norm_bias": (d,),
        "y0": (b, d),
        "h0": states.get(sizes.kind, (b, d)),
    }


def sizes_of(
    kind: str, layout: Layout, options: Options, raw: Tensor, weight_y: Tensor, x: Tensor, A: Tensor
) -> Sizes:
    """Sizes, where layout and options go with them.

    Raises:
        Unsupported: more reflections than there is code for. ValueError: what cannot be.
    """
    (b, length, d), heads, n = x.shape, 1, 1
    if kind == "mamba2":
        heads, n = len(A), _states(raw, layout, options)
    elif kind == "mamba1":
        n = A.shape[-1]
    sizes = Sizes(kind, b, length, d, n, heads, raw.shape[-1], len(weight_y))
    _check(layout, options, *sizes[:1], *sizes[3:])
    return sizes


@functools.cache
def _check(layout, options, kind, d, n, heads, columns, reading):
    r, groups = options.rank, options.groups
    if r > MOST_REFLECTIONS:
        raise Unsupported(f"{r} reflections: the kernels solve up to {MOST_REFLECTIONS}")
    if r < 1 or options.act not in ACTS or options.norm not in NORMS:
        raise ValueError(
            f"rank {r} of 1 and above, act `{options.act}` of {', '.join(ACTS)}, norm"
            f" `{options.norm}` of {', '.join(NORMS)}"
        )
    if heads < 1 or groups < 1 or d % heads or heads % groups:
        raise ValueError(f"{d} channels, {heads} heads and {groups} groups do not divide evenly")
    parts = [(layout.vectors, r * d), (layout.gates, r)]
    parts += [] if kind == "rnn" else [(layout.B, groups * n), (layout.C, groups * n)]
    ends = [0, *(first + wide for first, wide in sorted(parts))]
    starts = [*(first for first, _ in sorted(parts)), columns]
    if any(end > start for end, start in zip(ends, starts)) or reading > columns:
        raise ValueError(
            f"parts {sorted(parts)} overlap or exceed the {columns} columns of raw, {reading} of"
            " which read y"
        )


def fits_a_gpu(r: int, d: int) -> bool:
    """Whether a GPU's kernel solves a token of r reflections of d channels."""

    def padded(size):
        return 1 << (size - 1).bit_length()

    return r <= MOST_REFLECTIONS and padded(r) * padded(d) <= MOST_ENTRIES


def _states(raw, layout, options):
    """n of FP-Mamba-2, whose A does not tell it: B and C reach to the next part or the end."""
    if options.states:
        return options.states
    starts = (*layout, raw.shape[-1])
    ends = [min([at for at in starts if at > first], default=first) for first in layout[2:]]
    return min(end - first for end, first in zip(ends, layout[2:])) // options.groups
