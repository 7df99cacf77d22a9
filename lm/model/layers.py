"""The small layers that blocks and mixers are made of, and what a linear one does as a matrix.

Whatever holds parameters is called as a module, never read from outside: only so do adapters,
quantisation and offloading, which replace a module or hook into its call, act.

The projections of x and of sh(y) that a token is made from are side by side: one product serves
them all.

Shape suffixes: b batch, l length, d channels (d_inner), m columns.
"""

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .scan import causal_conv, faster
from .state import once


class _WeightOf(torch.Tensor):
    """What `WNLinear.weight` reads as: W, whose `.data` can be assigned, as adapters that merge
    themselves do (`layer.weight.data += …`). Its other changes in place would be lost: errors."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise TypeError(
                f"{name}: the weight of a WNLinear is computed from its direction and gain; change"
                " these, or assign a new one (layer.weight = …)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @property
    def data(self):
        return self.detach().as_subclass(_WeightOf)

    @data.setter
    def data(self, value):
        self.layer.weight = value


class WNLinear(NonDynamicallyQuantizableLinear):
    """A linear layer with weight normalisation per output row: W = gain · direction / ‖direction‖
    (Salimans & Kingma 2016). `direction`: (out,in), `gain`: (out,1), `bias`: (out,) or None.

    `weight` is W: reading computes it, writing splits it into gain and direction. Quantisers leave
    the layer as it is (the base class is torch's word for that).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make `weight` a parameter
        self.in_features, self.out_features = in_features, out_features
        self.direction = nn.Parameter(torch.empty(out_features, in_features))
        self.gain = nn.Parameter(torch.empty(out_features, 1))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def matrix(self) -> torch.Tensor:
        """W, (out,in)."""
        norm = torch.linalg.vector_norm(self.direction, dim=1, keepdim=True)
        return self.gain * (self.direction / norm.clamp_min(torch.finfo(norm.dtype).tiny))

    @property
    def weight(self) -> torch.Tensor:
        weight = self.matrix().as_subclass(_WeightOf)
        weight.layer = self
        return weight

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.direction.copy_(value)
            self.gain.copy_(torch.linalg.vector_norm(self.direction, dim=1, keepdim=True))

    def __setattr__(self, name: str, value: Any) -> None:
        # A Parameter would be registered, past the property.
        super().__setattr__(name, value.data if name == "weight" else value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.matrix(), self.bias)


# What the unit vectors are multiplied by: beside the bias, W must keep its digits in bf16. A power
# of two, so that nothing else is rounded.
PROBE = 1024.0


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast on x's device."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def product_dtype(weight: torch.Tensor) -> torch.dtype:
    """The dtype in which a linear layer of such a weight multiplies now."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def on_cpu(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def linear_by_eights(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """F.linear; on a GPU with as many rows of zeros as make their number a multiple of 8, which
    tensor cores need to be fast."""
    rows = len(matrix)
    missing = -rows % 8
    if on_cpu(x) or not missing:
        return F.linear(x, matrix, bias)
    padded = F.pad(matrix, (0, 0, 0, missing))
    return F.linear(x, padded, None if bias is None else F.pad(bias, (0, missing)))[..., :rows]


def is_hooked(layer: nn.Module) -> bool:
    """Return whether a call of the layer runs something besides its own forward."""
    forward = layer._forward_hooks or layer._forward_pre_hooks
    backward = layer._backward_hooks or layer._backward_pre_hooks
    return "forward" in vars(layer) or bool(forward or backward)


def affine_map(linear: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The matrix (out,in) and bias ((out,) or None) by which a linear layer acts.

    A layer that is something else than its own parameters (wrapped by an adapter, quantised,
    offloaded by a hook) is asked what it does to the unit vectors and to zero.

    Args:
        linear: nn.Linear, WNLinear, or what has taken its place. like: a tensor of the dtype and on
        the device to compute with.
    """
    if type(linear) in (nn.Linear, WNLinear) and not is_hooked(linear):
        matrix = linear.matrix() if isinstance(linear, WNLinear) else linear.weight
        return matrix, linear.bias
    eye = torch.eye(linear.in_features, dtype=like.dtype, device=like.device)
    rows = linear(F.pad(PROBE * eye, (0, 0, 0, 1)))  # the last is zero
    return (rows[:-1] - rows[-1]).t() / PROBE, rows[-1]


class Orthogonal(nn.Module):
    """An orthogonal matrix: Q = base · exp(X − Xᵀ), X the lower triangle of `weight` (d,d); the
    matrix-exponential map with trivialisation (Lezcano-Casado 2019) that torch also uses."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d, d))
        self.register_buffer("base", torch.empty(d, d))

    def forward(self) -> torch.Tensor:
        """Q, (d,d)."""
        X = self.weight.tril()
        wide = torch.promote_types(X.dtype, torch.float32)
        return self.base @ torch.matrix_exp((X - X.T).to(wide)).to(self.base.dtype)


def parameters_of(modules: list[nn.Module], known: tuple[type, ...]) -> list[torch.Tensor] | None:
    """Every parameter and buffer of modules, if what they do depends on these alone; else None.

    Args:
        known: the classes that they may have besides linear layers and Orthogonal.
    """
    found = []
    for part in (part for module in modules for part in module.modules()):
        plain = type(part) in (nn.Linear, WNLinear, Orthogonal) and not is_hooked(part)
        if not plain and not isinstance(part, known):
            return None
        found += part._parameters.values()
        found += part._buffers.values()
    return [t for t in found if t is not None]


class StepSize(nn.Linear):
    """The map of the low-rank δ to the width of Δ, before the softplus: product in x's dtype, bias
    added in fp32 or wider, which softplus needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x, self.weight.to(x.dtype)).to(wide) + self.bias.to(wide)


class ShortConv(nn.Conv1d):
    """silu(depthwise causal convolution), within documents. d: channels, k: width."""

    def __init__(self, d: int, k: int, bias: bool = True) -> None:
        super().__init__(d, d, k, groups=d, padding=k - 1, bias=bias)

    def forward(
        self,
        x: torch.Tensor,
        segments: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: (b,l,d) → (b,l,d). segments, before: see `causal_conv`."""
        args = x, self.weight, self.bias, segments, before
        found = faster("short_conv", "short_conv", x, *args)
        return F.silu(causal_conv(*args)) if found is None else found


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32 or wider, returned in the weight's dtype."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        unit = F.rms_norm(x, self.weight.shape, None, self.eps)
        return unit.to(self.weight.dtype) * self.weight


class GroupNorm(nn.GroupNorm):
    """Every token's groups of channels normalised, (b,l,d) → (b,l,d), in fp32 or wider."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        normed = F.group_norm(wide.flatten(0, 1), self.num_groups, weight, bias, self.eps)
        return normed.view_as(wide)


class Centroids(nn.Module):
    """Learned vectors of which the nearest is read, softly, in the place of the state y before a
    token:

        r(y) = Σ_i α_i c_i,    α = softmax_i(β (y · c_i − ‖c_i‖² / 2) / d),

    and zero where there is no token before. A state near c_i is pulled to c_i, so small errors do
    not add up. This is the state-regularised RNN (Wang & Niepert 2019, arXiv 1901.08817) with α of
    the squared distance. β is learned.
    """

    def __init__(self, k: int, d: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(k, d))  # c
        self.log_sharpness = nn.Parameter(torch.empty(1))  # log β

    def maps(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys (k,d), key_bias (k,) and values (k,d) in `dtype`:
        r(y) = softmax(keys y + key_bias) values."""
        c = self.vectors.to(dtype)
        scale = self.log_sharpness.to(dtype).exp() / c.shape[-1]
        return scale * c, -scale * c.square().sum(-1) / 2, c

    def forward(
        self, y: torch.Tensor | None, noise: torch.Tensor | None, dtype: torch.dtype = torch.float32
    ) -> Any:
        """Read states through the centroids, in fp32 or wider.

        Args:
            y: (…,d), the state before each token; zero where there is no token before. None: return
                `maps(dtype)` for a kernel. (A call of the module, because adapters and offloading
                act on nothing else.)
            noise: (…,d), added to the states before they are read, or None.
            dtype: of the maps.

        Returns:
            (…,d) in y's dtype.
        """
        if y is None:
            return self.maps(dtype)
        # A norm makes y in every block that has centroids, so y is exactly zero only where there is
        # no token before. Zero must not be a centroid: it would capture states that lie between all
        # others.
        has_token_before = y.detach().ne(0).any(-1, keepdim=True)
        wide = torch.promote_types(y.dtype, torch.float32)
        with without_autocast(y):
            keys, key_bias, values = self.maps(wide)
            noisy = (y if noise is None else y + noise).to(wide)
            alpha = torch.softmax(F.linear(noisy, keys, key_bias), -1) * has_token_before
            return (alpha @ values).to(y.dtype)


class Projection(NamedTuple):
    """One linear map of what a block reads."""

    name: str
    from_x: torch.Tensor  # (b,l,m) what x gives, bias included
    of_y: torch.Tensor | None  # (m,d) the matrix that sh(y) is multiplied by; None: it is not read


class Projections(NamedTuple):
    """All projections of a solve, side by side; those that read sh(y) come first."""

    raw: torch.Tensor  # (b,l,m) the x part of all
    columns: dict[str, slice]  # where each lies in raw
    weight_y: torch.Tensor  # (k,d) what the first k columns of raw get from sh(y)
    centroids: Centroids | None = None  # through which sh(y) is read
    noise: torch.Tensor | None = None  # (b,l,d) added to sh(y) before that

    def rows(self, y_before: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each projection by name, (b,l,·), in raw's dtype. y_before: (b,l,d) sh(y)."""
        k = len(self.weight_y)
        reading = [name for name, at in self.columns.items() if at.start < k]
        rows = {name: self.raw[..., at] for name, at in self.columns.items() if at.start >= k}
        if reading:
            wide = [self.columns[name].stop - self.columns[name].start for name in reading]
            rows.update(zip(reading, self._read(y_before).split(wide, -1)))
        return rows

    def _read(self, y_before):
        """Those columns of raw that read sh(y), with what it gives them."""
        raw, weight = self.raw[..., : len(self.weight_y)], self.weight_y
        if self.centroids is not None:
            y_before = self.centroids(y_before, self.noise)
        y_before = y_before.to(weight.dtype)
        of_one_dtype = raw.dtype == weight.dtype == product_dtype(weight)
        if on_cpu(raw) or not of_one_dtype:
            return raw + F.linear(y_before, weight).to(raw.dtype)
        found = torch.addmm(raw.flatten(0, 1), y_before.flatten(0, 1), weight.t())
        return found.unflatten(0, raw.shape[:2])

    def moved(self, noise: torch.Tensor | None) -> "Projections":
        """As if `noise` (b,l,d) were added to sh(y) wherever it is read; None: none."""
        k = self.weight_y.shape[0]
        if noise is None or not k:
            return self
        if self.centroids is not None:
            return self._replace(noise=noise)
        read = F.linear(noise.to(self.weight_y.dtype), self.weight_y).to(self.raw.dtype)
        return self._replace(raw=self.raw + F.pad(read, (0, self.raw.shape[-1] - k)))

    def readout(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...] | None:
        """What lm.kernels.cell_arguments calls a Readout; None without centroids."""
        if self.centroids is None:
            return None
        noise = None if self.noise is None else self.noise.to(dtype)
        return *self.centroids(None, None, dtype), noise

    def cut(self, start: int, end: int) -> "Projections":
        """Of the tokens start ≤ t < end."""
        noise = None if self.noise is None else self.noise[:, start:end]
        return self._replace(raw=self.raw[:, start:end], noise=noise)


def side_by_side(
    projections: Iterable[Projection], width: int, dtype: torch.dtype, kept: Any = None
) -> Projections:
    """Projections, made of a list of Projection.

    Args:
        width: d. dtype: of raw.
        kept: a state.WeightCache for the joined maps, or None.
    """
    ordered = sorted(projections, key=lambda projection: projection.of_y is None)
    maps = [projection.of_y for projection in ordered if projection.of_y is not None]
    missing = -sum(map(len, maps)) % 8
    if missing and not on_cpu(maps[0]):  # tensor cores need multiples of 8 to be fast
        from_x = ordered[0].from_x
        from_x, of_y = (
            from_x.new_zeros(*from_x.shape[:-1], missing),
            maps[0].new_zeros(missing, width),
        )
        ordered.insert(len(maps), Projection("padding", from_x, of_y))
        maps.append(of_y)
    raw = torch.cat([projection.from_x.to(dtype) for projection in ordered], -1)
    columns, start = {}, 0
    for projection in ordered:
        end = start + projection.from_x.shape[-1]
        columns[projection.name] = slice(start, end)
        start = end
    if not maps:
        return Projections(raw, columns, raw.new_zeros(0, width))

    def joined():
        weight = torch.cat(maps)
        return weight.to(dtype) if dtype.itemsize < weight.dtype.itemsize else weight

    return Projections(raw, columns, once(kept, ("weight_y", dtype), joined))
