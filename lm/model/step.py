"""What one iteration does besides products and the scan, in plain PyTorch; lm/kernels fuses it.

Shape suffixes: b batch, l length, d channels (d_inner).
"""

import torch
import torch.nn.functional as F

from .mixers import added, nrm
from .scan import backend
from .solver import token_residual


def normalise(v_x, v_y, groups, eps):
    """nrm(v_x + v_y) of each of the groups that the last dimension is cut into; v_y may be None."""
    fast = backend("step", v_x)
    if fast is not None:
        return fast.normalise(v_x, v_y, groups, eps)
    v = added(v_x, v_y)
    return nrm(v.unflatten(-1, (groups, -1)), eps).flatten(-2)


def finish(o, x, D, z, weight, bias, eps, kind):
    """The end of an iteration: the skip, the gate and the norm of w = (o + D ⊙ x) ⊙ silu(z).

    Args:
        o: (b,l,d) from the scan. x: (b,l,d) mixed. D: (d,). z: (b,l,d), or None for no gate.
        weight: (d,). bias: (d,) or None. kind: "layer" (LayerNorm) or "rms" (RMSNorm).
    Returns:
        (b,l,d), in o's dtype.
    """
    fast = backend("step", o)
    if fast is not None and hasattr(fast, "finish"):
        return fast.finish(o, x, D, z, weight, bias, eps, kind)
    w = o + D.to(o.dtype) * x
    if z is not None:
        w = w * F.silu(z.to(o.dtype))
    weight = weight.to(o.dtype)
    if kind == "layer":
        return F.layer_norm(w, weight.shape, weight, bias.to(o.dtype), eps)
    return w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps) * weight


def finish_residual(o, x, D, z, weight, bias, eps, kind, y):
    """`finish` and the solver's `token_residual` (b,l) of y (b,l,d) and it; no gradient."""
    fast = backend("step", o)
    if fast is not None:
        ends = D, z, weight, bias
        if o.is_cpu:  # compiled for one dtype
            ends = (None if t is None else t.to(o.dtype) for t in ends)
        return fast.finish_residual(o, x, *ends, eps, kind, y)
    g = finish(o, x, D, z, weight, bias, eps, kind)
    return g, token_residual(y, g)
