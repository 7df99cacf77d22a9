"""What one iteration does besides products and the scan, in plain PyTorch; lm/kernels fuses it.

Shape suffixes: b batch, l length, d channels (d_inner).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .cell import Norm
from .layers import RMSNorm
from .mixers import nrm
from .scan import faster
from .solver import token_residual


def normalise(v: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """nrm(v) (b,l,k) of each of the groups that the last dimension is cut into. v: (b,l,k)."""
    unit = faster("step", "normalise", v, v, groups, eps)
    if unit is not None:
        return unit
    return nrm(v.unflatten(-1, (groups, -1)), eps).flatten(-2)


class EndLayerNorm(nn.LayerNorm):
    """The end of an FP-Mamba-1 iteration: LayerNorm((o + D ⊙ x) ⊙ silu(z))."""

    def forward(
        self,
        o: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        y: torch.Tensor | None = None,
    ) -> Any:
        """`finish`, and given the iterate y (b,l,d) as well, `finish_residual`; of nothing, the
        Norm by itself."""
        if o is None:
            return Norm("layer", self.weight, self.bias, self.eps)
        end = o, x, D, z, self.weight, self.bias, self.eps, "layer"
        return finish(*end) if y is None else finish_residual(*end, y)


class EndRMSNorm(RMSNorm):
    """The end of an FP-Mamba-2 iteration: RMSNorm((o + D ⊙ x) ⊙ silu(z))."""

    def forward(  # type: ignore[override]
        self,
        o: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        y: torch.Tensor | None = None,
    ) -> Any:
        """`finish`, and given the iterate y (b,l,d) as well, `finish_residual`; of nothing, the
        Norm by itself."""
        if o is None:
            return Norm("rms", self.weight, None, self.eps)
        end = o, x, D, z, self.weight, None, self.eps, "rms"
        return finish(*end) if y is None else finish_residual(*end, y)


def finish(
    o: torch.Tensor,
    x: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    kind: str,
) -> torch.Tensor:
    """The end of an iteration: the skip, the gate and the norm of w = (o + D ⊙ x) ⊙ silu(z).

    Args:
        o: (b,l,d) from the scan. x: (b,l,d) mixed. D: (d,). z: (b,l,d), or None for no gate.
        weight: (d,). bias: (d,) or None. kind: "layer" (LayerNorm) or "rms" (RMSNorm).
    Returns:
        (b,l,d), in o's dtype.
    """
    ends = _of_one_dtype(o, D, z, weight, bias)
    g = faster("step", "finish", o, o, x, *ends, eps, kind)
    if g is not None:
        return g
    w = o + D.to(o.dtype) * x
    if z is not None:
        w = w * F.silu(z.to(o.dtype))
    weight = weight.to(o.dtype)
    if kind == "layer":
        return F.layer_norm(w, weight.shape, weight, bias.to(o.dtype), eps)  # type: ignore[union-attr]
    return w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps) * weight


def finish_residual(
    o: torch.Tensor,
    x: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    kind: str,
    y: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`finish` and the solver's `token_residual` (b,l) of y (b,l,d) and it; no gradient."""
    ends = _of_one_dtype(o, D, z, weight, bias)
    found = faster("step", "finish_residual", o, o, x, *ends, eps, kind, y)
    if found is not None:
        return found
    g = finish(o, x, D, z, weight, bias, eps, kind)
    return g, token_residual(y, g)


def _of_one_dtype(o, *tensors):
    """The tensors in o's dtype on a CPU, whose kernels are compiled for one; else as they are."""
    return [t if t is None or not o.is_cpu else t.to(o.dtype) for t in tensors]
