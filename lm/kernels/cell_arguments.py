"""Arguments of the `cell` kernels, which solve a whole layer exactly, token by token.

The backends (cpu/cpu_cell.py, triton/triton_cell.py) share these structures and their checks. For
token t, given y_{t−1} and the state h_{t−1}, they solve (docs/model.md derives the equations):

    row = raw_t + [W_y y_{t−1}, 0]                  its parts: vectors, gates, B and C (see Layout)
          (with centroids c_i: W_y Σ_i α_i c_i, α = softmax(keys (y_{t−1} + noise) + key_bias))
    u_i = nrm(act(vector_i)), the rows of U         nrm(z) = z / max(‖z‖, eps)
    a = scale · σ(gates)                            T (r,r) from a: householder or dplr
    I − Q = Uᵀ T U                                  x̃(s) = x + Uᵀ T (s − U x) = Q x + (I − Q) y
    v(s) = g ⊙ (exp(dt A) h_{t−1} C + γ ⊙ x̃(s))     γ = dt (B·C) + D
    s = U norm(v(s))                                r equations for the unknown s = U y_t
    y_t = norm(v(s));  h_t = exp(dt A) h_{t−1} + (dt ⊙ x̃(s)) Bᵀ

The gradient is backpropagation through this recurrence, with the implicit function theorem for s.

Shape suffixes: b batch, l length, d channels, n states, r reflections, K columns of raw, k columns
to which W_y y_{t−1} is added (the first ones).
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lm.kernels import Unsupported

MAX_REFLECTIONS = 8
FAILED, BISECTED, GRAD_LIMITED = 1, 2, 4  # as in lm/model/solver.py
MAX_GPU_ENTRIES = 65_536  # entries of a token's vectors that one program of a GPU can hold
NORMS = ("layer", "rms", "none")
ACTS = ("silu", "relu", "identity")
# Fields of CellArguments with a gradient, in the order in which the backends return gradients.
DIFFERENTIABLE = ("raw", "weight_y", "x", "dt", "A", "gate", "D", "norm_weight", "norm_bias")


class Layout(NamedTuple):
    """First column of each part within a row of raw."""

    vectors: int  # r·d columns: vector_i is at vectors + i·d
    gates: int  # r columns
    B: int = 0  # groups·n columns
    C: int = 0  # groups·n columns


class Options(NamedTuple):
    """Settings of a layer that select its equations."""

    rank: int  # r, the number of reflections
    scale: float  # 2 for eigenvalues of Q in [−1, 1], 1 for [0, 1]
    act: str  # activation of the vectors, one of ACTS
    sequential: bool  # True: householder; False: dplr
    eps: float  # eps of nrm
    contractive: float | None  # bound κ of ‖I − Q‖: T is multiplied by κ / max(κ, Σ a)
    bc_norm: bool  # True: B and C are normalized by nrm
    groups: int  # number of groups of B and C
    norm: str  # one of NORMS
    norm_eps: float
    states: int  # n of FP-Mamba-2; other layers do not read it


class Readout(NamedTuple):
    """The centroids through which y_{t−1} is read; see Centroids in lm/model/layers.py."""

    keys: Tensor  # (number of centroids, d)
    key_bias: Tensor  # (number of centroids,)
    values: Tensor  # (number of centroids, d)
    noise: Tensor | None  # (b,l,d)


class CellArguments(NamedTuple):
    """Arguments of `cell`, which solves an FP-Mamba-1, FP-Mamba-2 or FP-RNN layer.

    FP-RNN computes y_t = h_t = A_t ⊙ h_{t−1} + dt_t ⊙ x̃_t: A is the decay itself. `norm` is "none",
    `groups` is 1, and gate, D and readout are None. Columns and options of B and C are ignored.

    Of its results only y has a gradient, of first order, with respect to raw, weight_y, x, dt, A,
    gate, D, norm_weight, norm_bias and the readout.

    Attributes:
        layout: Columns of raw.
        options: Settings of the layer.
        raw: The part of the projections that depends on x, biases included, (b,l,K).
        weight_y: W_y, (k,d); k may be 0.
        x: Input of the mixer, (b,l,d).
        dt: Step sizes, FP-Mamba-1: (b,l,d); FP-Mamba-2: (b,l,heads). 0 leaves the state unchanged.
            FP-RNN: factor on x̃, (b,l,d).
        A: FP-Mamba-1: (d,n); FP-Mamba-2: (heads,); FP-RNN: factor on the state, (b,l,d).
        keep: (b,l), 0 at tokens that start a document, else 1; or None.
        gate: g, (b,l,d), or None.
        D: Skip weights, (d,), or None.
        norm_weight: (d,), or None.
        norm_bias: (d,), or None.
        y0: y before the first token, (b,d); zero if None.
        h0: State before the first token, FP-Mamba-1: (b,d,n); FP-Mamba-2: (b,heads,d/heads,n);
            FP-RNN: (b,d); zero if None.
        adjoint: Tensor (b,) into which the backward pass writes max_t ‖λ_t‖ / max_t ‖∂y_t‖; or
            None. ∂y_t is the gradient of the output y_t; λ_t is ∂y_t plus the gradient that the
            next token gives to y_t through W_y.
        readout: Centroids; None if y_{t−1} is read directly.
    """

    layout: Layout
    options: Options
    raw: Tensor
    weight_y: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    keep: Tensor | None
    gate: Tensor | None = None
    D: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    y0: Tensor | None = None
    h0: Tensor | None = None
    adjoint: Tensor | None = None
    readout: Readout | None = None

    @property
    def kind(self) -> str:
        """The layer: "mamba1", "mamba2" or "rnn". The shape of A differs; see `expected_shapes`."""
        return {1: "mamba2", 2: "mamba1", 3: "rnn"}[self.A.dim()]


# An exported model runs without this package and cannot import the classes above. It passes a
# mapping with the same fields, in which layout, options and readout are plain tuples.
def as_cell_arguments(arguments: CellArguments | Mapping[str, Any]) -> CellArguments:
    """Convert the argument of `cell` to CellArguments."""
    if isinstance(arguments, CellArguments):
        return arguments
    converted = CellArguments(**arguments)
    readout = converted.readout
    return converted._replace(
        layout=Layout(*converted.layout),
        options=Options(*converted.options),
        readout=None if readout is None else Readout(*readout),
    )


class Sizes(NamedTuple):
    """Sizes of a problem, read from the shapes of its arguments."""

    kind: str  # "mamba1", "mamba2" or "rnn"
    b: int
    length: int
    d: int
    n: int
    heads: int
    columns: int  # K
    y_columns: int  # k


@functools.lru_cache(1024)
def expected_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor among the fields of CellArguments, in their order."""
    b, d, n, heads = sizes.b, sizes.d, sizes.n, sizes.heads
    tokens = (b, sizes.length, d)
    dt = {"mamba1": tokens, "mamba2": (b, sizes.length, heads), "rnn": tokens}
    A = {"mamba1": (d, n), "mamba2": (heads,), "rnn": tokens}
    h0 = {"mamba1": (b, d, n), "mamba2": (b, heads, d // heads, n), "rnn": (b, d)}
    return {
        "raw": (b, sizes.length, sizes.columns),
        "weight_y": (sizes.y_columns, d),
        "x": tokens,
        "dt": dt[sizes.kind],
        "A": A[sizes.kind],
        "keep": (b, sizes.length),
        "gate": tokens,
        "D": (d,),
        "norm_weight": (d,),
        "norm_bias": (d,),
        "y0": (b, d),
        "h0": h0[sizes.kind],
    }


def check_sizes(arguments: CellArguments) -> Sizes:
    """Return the sizes of a problem after checking them against its layout and options.

    Raises:
        Unsupported: If the kernels have no code for that many reflections.
        ValueError: If an option is unknown, or if sizes do not fit together.
    """
    kind, layout, options = arguments.kind, arguments.layout, arguments.options
    b, length, d = arguments.x.shape
    heads, n = 1, 1  # FP-RNN has one state per channel
    if kind == "mamba2":
        heads, n = len(arguments.A), options.states
    elif kind == "mamba1":
        n = arguments.A.shape[-1]
    columns, y_columns = arguments.raw.shape[-1], len(arguments.weight_y)
    _check_layout(layout, options, kind, d, n, heads, columns, y_columns)
    return Sizes(kind, b, length, d, n, heads, columns, y_columns)


@functools.cache
def _check_layout(layout, options, kind, d, n, heads, columns, y_columns):
    r, groups = options.rank, options.groups
    check_rank(r)
    if r < 1 or options.act not in ACTS or options.norm not in NORMS:
        raise ValueError(
            f"rank {r}, act `{options.act}`, norm `{options.norm}`: rank must be at least 1, act"
            f" must be {', '.join(ACTS)}, and norm {', '.join(NORMS)}"
        )
    if heads < 1 or groups < 1 or d % heads or heads % groups:
        raise ValueError(f"{d} channels, {heads} heads and {groups} groups do not divide evenly")
    parts = [(layout.vectors, r * d), (layout.gates, r)]  # first column, width
    if kind != "rnn":
        parts += [(layout.B, groups * n), (layout.C, groups * n)]
    ends = [0, *(start + width for start, width in sorted(parts))]
    next_starts = [*(start for start, _ in sorted(parts)), columns]
    if any(end > start for end, start in zip(ends, next_starts)) or y_columns > columns:
        raise ValueError(
            f"parts {sorted(parts)} (first column, width) overlap or exceed the {columns} columns"
            f" of raw, {y_columns} of which read y"
        )


def check_rank(r: int) -> None:
    """Raise Unsupported if the equations of tokens have too many unknowns r for the kernels."""
    if r > MAX_REFLECTIONS:
        raise Unsupported(f"the mixer has rank {r}: the kernels solve up to {MAX_REFLECTIONS}")


def fits_a_gpu(r: int, d: int) -> bool:
    """Return whether a GPU's kernel can solve tokens with r reflections of d channels."""

    def round_up(size):  # to a power of two: Triton has no other blocks
        return 1 << (size - 1).bit_length()

    return r <= MAX_REFLECTIONS and round_up(r) * round_up(d) <= MAX_GPU_ENTRIES
