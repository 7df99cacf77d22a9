"""What one fixed-point iteration computes beside its matrix products and its scan, compiled.

Shape suffixes: b batch, l length, d channels, r reflections; k entries of a projection.

The oracles are lm.model.mixers.Reflections and nrm, the norms that end an iteration of the blocks,
and lm.model.solver.token_residual. There are no gradients: this is for the solve, which needs none.
Every token is computed by itself: no result depends on the number of threads, nor on the batch.
Gates, vectors and other inputs may be slices of wider tensors, which are not copied.
"""

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu.build import DTYPES, address, check, functions, token_step

# The structs of step.cpp, field by field.
_pack_mix = struct.Struct("15q2d").pack
_pack_normalise = struct.Struct("7qd").pack
_pack_finish = struct.Struct("18qd").pack
_ACTS = {"silu": 0, "relu": 1, "identity": 2}
_KINDS = {"layer": 0, "rms": 1}


def usable() -> tuple[bool, str]:
    """Whether these run here, and if not, why not, in a sentence; see build.usable."""
    return cpu_build.usable(_self_check)


def mix(
    gates: Tensor,
    vectors: Tensor,
    x: Tensor,
    y: Tensor,
    rank: int,
    scale: float,
    eps: float,
    act: str = "silu",
    sequential: bool = True,
) -> Tensor:
    """x̃ = M(x − y) + y, M the product or the sum of r reflections (householder, dplr).

        δ ← δ − a_i u_i (u_iᵀ δ)        a = scale σ(gates), u = nrm(act(vectors))

    Args:
        gates: (b,l,r). vectors: (b,l,r·d), u_1 first. x, y: (b,l,d). rank: r.
        eps: the least that a vector is divided by.
        act: "silu", "relu" or "identity". sequential: one reflection after the other
        (householder); else all of the same δ (dplr).
    Returns:
        x̃ (b,l,d)
    Raises:
        RuntimeError: a gradient would be needed. TypeError, ValueError: devices, shapes, names.
        Unsupported: dtypes.
    """
    b, length, d = shape = x.shape
    _no_gradient(gates, vectors, x, y)
    check(
        x.dtype,
        ("x", x, shape),
        ("y", y, shape),
        ("gates", gates, (b, length, rank)),
        ("vectors", vectors, (b, length, rank * d)),
    )
    if act not in _ACTS or rank < 1:
        raise ValueError(f"act is `{act}` of {', '.join(_ACTS)} and rank {rank} of 1 and above")
    mixed = x.new_empty(b, length, d)
    # In the order of the struct's fields: sizes, steps between tokens, addresses, numbers.
    tensors, steps = _spaced(gates, vectors, x, y)
    sizes = (b * length, d, rank, _ACTS[act], sequential, torch.get_num_threads())
    addresses = [address(t) for t in (*tensors, mixed)]
    functions()["mix"][x.dtype](_pack_mix(*sizes, *steps, *addresses, scale, eps))
    return mixed


def normalise(v: Tensor, groups: int, eps: float) -> Tensor:
    """nrm(v) of each of `groups` equal parts of the last dimension.

    Args:
        v: (b,l,k), groups divides k. eps: the least to divide by.
    Returns:
        (b,l,k)
    Raises:
        As `mix`.
    """
    b, length, k = shape = v.shape
    _no_gradient(v)
    check(v.dtype, ("v", v, shape))
    if groups < 1 or k % groups:
        raise ValueError(f"{groups} groups do not divide {k} entries")
    unit = v.new_empty(b, length, k)
    tensors, steps = _spaced(v)
    sizes = (b * length, groups, k // groups, torch.get_num_threads())
    addresses = [address(t) for t in (*tensors, unit)]
    functions()["normalise"][v.dtype](_pack_normalise(*sizes, *steps, *addresses, eps))
    return unit


def finish_residual(
    o: Tensor,
    x: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
    y: Tensor | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """g = norm((o + D ⊙ x) ⊙ silu(z)), and how far it is from y.

    Args:
        o: (b,l,d). x: (b,l,d) and D: (d,), both None where o has that term. z: (b,l,d) or None for
        no gate. kind: "layer", LayerNorm with weight and bias (d,), or "rms", RMSNorm with weight.
        y: (b,l,d) or None. mask: (b,l) bool, g is zero where it is False; all True if None.
    Returns:
        g (b,l,d), and ‖y − g‖∞ / (‖g‖∞ + 1e-8) of every token (b,l), NaN where anything in it is;
        None without y.
    Raises:
        As `mix`.
    """
    b, length, d = shape = o.shape
    _no_gradient(o, x, D, z, weight, bias, y)
    check(
        o.dtype,
        ("o", o, shape),
        ("x", x, shape),
        ("D", D, (d,)),
        ("z", z, shape),
        ("weight", weight, (d,)),
        ("bias", bias, (d,)),
        ("y", y, shape),
    )
    _check_mask(mask, (b, length))
    if kind not in _KINDS or (x is None) != (D is None):
        raise ValueError(
            f"kind is `{kind}` of {', '.join(_KINDS)}; x and D go together, or are both None"
        )
    D, weight, bias, mask = (t if t is None else t.contiguous() for t in (D, weight, bias, mask))
    g = o.new_empty(b, length, d)
    residual = None if y is None else o.new_empty(b, length)
    # In the order of the struct's fields: sizes, steps between tokens, addresses, numbers.
    (o, x, z, y), steps = _spaced(o, x, z, y)
    sizes = (b * length, d, _KINDS[kind], torch.get_num_threads())
    read_and_written = (o, x, D, z, weight, bias, y, mask, g, residual)
    addresses = [address(t) for t in read_and_written]
    functions()["finish"][o.dtype](_pack_finish(*sizes, *steps, *addresses, eps))
    return g, residual


def finish(
    o: Tensor,
    x: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
) -> Tensor:
    """`finish_residual` without a residual: g (b,l,d)."""
    return finish_residual(o, x, D, z, weight, bias, eps, kind, None)[0]


def _check_mask(mask: Tensor | None, shape: tuple[int, int]) -> None:
    if mask is None:
        return
    if mask.shape != shape or mask.dtype is not torch.bool or not mask.is_cpu:
        found = f"{tuple(mask.shape)} of {mask.dtype} on {mask.device}"
        raise ValueError(f"mask is {found} where {shape} of bool is expected")


def _spaced(*tensors):
    """The tensors (b,l,·) as a kernel can read them, and what lies between two tokens of each, in
    entries; None stays None."""
    spaced = [(None, 0) if t is None else token_step(t) for t in tensors]
    return [t for t, _ in spaced], [step for _, step in spaced]


def _no_gradient(*tensors):
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError("this kernel has no gradient: call it under torch.no_grad()")


@torch.no_grad()
def _self_check() -> float:
    """The largest difference from plain PyTorch on a small problem; NaN if there is one."""
    errors, eps = [], 1e-5
    for dtype in DTYPES:
        wide = torch.linspace(-3, 70, 2 * 3 * 96, dtype=dtype).sin().reshape(2, 3, 96)
        x, y, v, z, D, gate = wide.split([19, 19, 19, 19, 19, 1], -1)
        D = D[0, 0].contiguous()
        u = F.silu(v)
        u, unit = (t / torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (u, v))
        mixed = x - torch.sigmoid(gate) * (u * (x - y)).sum(-1, keepdim=True) * u
        normed = F.layer_norm((x + D * y) * F.silu(z), D.shape, D, D, eps)
        change = (y - normed).abs().amax(-1) / normed.abs().amax(-1)
        ours = (
            mix(gate, v, x, y, 1, 1.0, eps),
            normalise(v, 1, eps),
            *finish_residual(x, y, D, z, D, D, eps, "layer", y),
        )
        pairs = zip(ours, (mixed, unit, normed, change))
        errors += [(a - b).abs().max().double() for a, b in pairs]
    return torch.stack(errors).max().item()
