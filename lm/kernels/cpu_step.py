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

from lm.kernels import cpu_build
from lm.kernels.cpu_build import DTYPES, address, check, functions, token_step

# The structs of cpu_step.cpp, field by field.
_pack_mix = struct.Struct("19q2d").pack
_pack_normalise = struct.Struct("9qd").pack
_pack_finish = struct.Struct("18qd").pack
_ACTS = {"silu": 0, "relu": 1, "identity": 2}
_KINDS = {"layer": 0, "rms": 1}


def usable() -> tuple[bool, str]:
    """Whether these run here, and if not, why not, in a sentence; see lm.kernels.cpu.usable."""
    return cpu_build.usable(_self_check)


def mix(
    gates_x, gates_y, vectors_x, vectors_y, x, y, rank, scale, eps, act="silu", sequential=True
):
    """x̃ = M(x − y) + y, M the product or the sum of r reflections (householder, dplr).

        δ ← δ − a_i u_i (u_iᵀ δ)        a = scale σ(gates_x + gates_y)
                                        u = nrm(act(vectors_x + vectors_y))

    Args:
        gates_x: (b,l,r). vectors_x: (b,l,r·d). gates_y, vectors_y: the same, or None.
        x, y: (b,l,d). rank: r. eps: the least that a vector is divided by.
        act: "silu", "relu" or "identity". sequential: one reflection after the other
        (householder); else all of the same δ (dplr).
    Returns:
        x̃ (b,l,d)
    Raises:
        RuntimeError: a gradient would be needed. TypeError, ValueError: devices, shapes, names.
        Unsupported: dtypes.
    """
    b, length, d = x.shape
    gates, vectors, inputs = (b, length, rank), (b, length, rank * d), (b, length, d)
    _no_gradient(gates_x, gates_y, vectors_x, vectors_y, x, y)
    check(
        x.dtype,
        ("x", x, inputs),
        ("y", y, inputs),
        ("gates_x", gates_x, gates),
        ("gates_y", gates_y, gates),
        ("vectors_x", vectors_x, vectors),
        ("vectors_y", vectors_y, vectors),
    )
    if act not in _ACTS or rank < 1:
        raise ValueError(f"act is `{act}` of {', '.join(_ACTS)} and rank {rank} of 1 and above")
    gates_x, gates_x_step = token_step(gates_x)
    vectors_x, vectors_x_step = token_step(vectors_x)
    gates_y, gates_y_step = _optional(gates_y)
    vectors_y, vectors_y_step = _optional(vectors_y)
    (x, x_step), (y, y_step) = token_step(x), token_step(y)
    mixed = x.new_empty(b, length, d)
    functions()["mix"][x.dtype](
        _pack_mix(
            b * length,
            d,
            rank,
            _ACTS[act],
            sequential,
            torch.get_num_threads(),
            gates_x_step,
            gates_y_step,
            vectors_x_step,
            vectors_y_step,
            x_step,
            y_step,
            gates_x.data_ptr(),
            address(gates_y),
            vectors_x.data_ptr(),
            address(vectors_y),
            x.data_ptr(),
            y.data_ptr(),
            mixed.data_ptr(),
            scale,
            eps,
        )
    )
    return mixed


def normalise(v_x, v_y, groups, eps):
    """nrm(v_x + v_y) of each of `groups` equal parts of the last dimension.

    Args:
        v_x: (b,l,k), groups divides k. v_y: the same, or None. eps: the least to divide by.
    Returns:
        (b,l,k)
    Raises:
        As `mix`.
    """
    b, length, k = shape = v_x.shape
    _no_gradient(v_x, v_y)
    check(v_x.dtype, ("v_x", v_x, shape), ("v_y", v_y, shape))
    if groups < 1 or k % groups:
        raise ValueError(f"{groups} groups do not divide {k} entries")
    (v_x, x_step), (v_y, y_step) = token_step(v_x), _optional(v_y)
    unit = v_x.new_empty(b, length, k)
    functions()["normalise"][v_x.dtype](
        _pack_normalise(
            b * length,
            groups,
            k // groups,
            torch.get_num_threads(),
            x_step,
            y_step,
            v_x.data_ptr(),
            address(v_y),
            unit.data_ptr(),
            eps,
        )
    )
    return unit


def finish_residual(o, x, D, z, weight, bias, eps, kind, y, mask=None):
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
    fits = mask is None or (mask.shape == shape[:2] and mask.dtype is torch.bool and mask.is_cpu)
    if not fits:
        wrong = f"{tuple(mask.shape)} of {mask.dtype} on {mask.device}"
        raise ValueError(f"mask is {wrong} where {(b, length)} of bool is expected")
    if kind not in _KINDS or (x is None) != (D is None):
        raise ValueError(
            f"kind is `{kind}` of {', '.join(_KINDS)}; x and D go together, or are both None"
        )
    (o, o_step), (x, x_step) = token_step(o), _optional(x)
    (z, z_step), (y, y_step) = _optional(z), _optional(y)
    D, weight, bias, mask = (t if t is None else t.contiguous() for t in (D, weight, bias, mask))
    g = o.new_empty(b, length, d)
    residual = None if y is None else o.new_empty(b, length)
    functions()["finish"][o.dtype](
        _pack_finish(
            b * length,
            d,
            _KINDS[kind],
            torch.get_num_threads(),
            o_step,
            x_step,
            z_step,
            y_step,
            o.data_ptr(),
            address(x),
            address(D),
            address(z),
            weight.data_ptr(),
            address(bias),
            address(y),
            address(mask),
            g.data_ptr(),
            address(residual),
            eps,
        )
    )
    return g, residual


def finish(o, x, D, z, weight, bias, eps, kind):
    """`finish_residual` without a residual: g (b,l,d)."""
    return finish_residual(o, x, D, z, weight, bias, eps, kind, None)[0]


def _optional(t):
    return (None, 0) if t is None else token_step(t)


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
        u = F.silu(v + z)
        u, unit = (t / torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (u, v + z))
        mixed = x - torch.sigmoid(gate) * (u * (x - y)).sum(-1, keepdim=True) * u
        normed = F.layer_norm((x + D * y) * F.silu(z), D.shape, D, D, eps)
        change = (y - normed).abs().amax(-1) / normed.abs().amax(-1)
        ours = (
            mix(gate, None, v, z, x, y, 1, 1.0, eps),
            normalise(v, z, 1, eps),
            *finish_residual(x, y, D, z, D, D, eps, "layer", y),
        )
        pairs = zip(ours, (mixed, unit, normed, change))
        errors += [(a - b).abs().max().double() for a, b in pairs]
    return torch.stack(errors).max().item()
