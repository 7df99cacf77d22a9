"""Small layers that blocks and mixers use, and the joined linear projections of a block.

Code calls modules, and does not read their parameters: adapters, quantisation and offloading
replace a module or hook into its call, and would have no effect otherwise. sh(y) is the state y of
the token before each token (state.shift).

Shape suffixes: b batch, l length, d channels (d_inner), m columns.
"""

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .scan import causal_conv, try_kernel
from .state import Sequences, cached, last_valid_tokens


class _ComputedWeight(torch.Tensor):
    """Value of `WNLinear.weight`: W, computed from direction and gain.

    Assigning its `.data` changes the layer, because adapters merge themselves that way
    (`layer.weight.data += …`). Other changes in place would be lost, and raise an error.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        has_in_place_name = name.endswith("_") and not name.endswith("__")  # such as add_
        if has_in_place_name or name == "__setitem__":
            raise TypeError(
                f"{name}: the weight of a WNLinear is computed from its direction and gain; change"
                " these, or assign a new one (layer.weight = …)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @property
    def data(self):
        return self.detach().as_subclass(_ComputedWeight)

    @data.setter
    def data(self, value):
        self.layer.weight = value


class _WeightNorm(torch.autograd.Function):
    """W = gain · direction / ‖direction‖ per row, with a gradient that reads each matrix twice.

    Autograd through the formula reads and writes four times as many bytes
    (notes/2026-11-gpu-kernel.md).
    """

    @staticmethod
    def forward(ctx, direction, gain, dtype):
        """Return W (out,in) in `dtype`, for direction (out,in) and gain (out,1)."""
        norm = torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        norm = norm.clamp_min(torch.finfo(norm.dtype).tiny)
        ctx.save_for_backward(direction, gain, norm)
        return torch.mul(direction / norm, gain, out=torch.empty_like(direction, dtype=dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        direction, gain, norm = ctx.saved_tensors
        scale = gain / norm
        grad_gain = (grad * direction).sum(1, keepdim=True) / norm
        grad_direction = grad * scale
        grad_direction.addcmul_(direction, grad_gain * scale / norm, value=-1)
        return grad_direction, grad_gain, None


class WNLinear(NonDynamicallyQuantizableLinear):
    """Linear layer with weight normalisation per output row: W = gain · direction / ‖direction‖.

    `direction` is (out,in), `gain` (out,1), `bias` (out,) or None. Reading `weight` computes W;
    assigning it splits a matrix into gain and direction. The base class keeps quantisers from
    replacing the layer.

    Source: Salimans & Kingma 2016.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make `weight` a parameter
        self.in_features, self.out_features = in_features, out_features
        self.direction = nn.Parameter(torch.empty(out_features, in_features))
        self.gain = nn.Parameter(torch.empty(out_features, 1))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def matrix(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return W, (out,in).

        Args:
            dtype: Dtype of W for fp32 parameters, which autocast would cast; None: fp32.
        """
        is_cast = dtype is not None and self.direction.dtype == torch.float32
        matrix_dtype = dtype if is_cast else self.direction.dtype
        return _WeightNorm.apply(self.direction, self.gain, matrix_dtype)

    @property
    def weight(self) -> torch.Tensor:
        weight = self.matrix().as_subclass(_ComputedWeight)
        weight.layer = self
        return weight

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.direction.copy_(value)
            self.gain.copy_(torch.linalg.vector_norm(self.direction, dim=1, keepdim=True))

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would register a Parameter, and the setter above would not be called.
        super().__setattr__(name, value.data if name == "weight" else value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.matrix(product_dtype(self.direction)), self.bias)


# Factor on the unit vectors with which `affine_map` measures a layer: W · PROBE_SCALE + bias must
# keep the digits of W in bf16. It is a power of two, so that the factor causes no rounding.
PROBE_SCALE = 1024.0


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast is off on x's device."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def product_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer with this weight multiplies now."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def is_on_cpu(x: torch.Tensor) -> bool:
    """Return whether a tensor is on the CPU."""
    return x.device.type == "cpu"


def padded_linear(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply F.linear. On a GPU, pad the matrix to a multiple of 8 rows, which tensor cores need.

    Returns:
        The product (b,l,m). On a GPU its last columns may be padding.
    """
    if is_on_cpu(x):
        return F.linear(x, matrix, bias)
    missing = -len(matrix) % 8
    if missing:
        matrix = F.pad(matrix, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    # With two dimensions, one launch computes the product and adds the bias.
    return F.linear(x.flatten(0, 1), matrix, bias).unflatten(0, x.shape[:2])


def is_hooked(layer: nn.Module) -> bool:
    """Return whether a call of the layer runs something besides the forward of its class."""
    forward_hooks = layer._forward_hooks or layer._forward_pre_hooks
    backward_hooks = layer._backward_hooks or layer._backward_pre_hooks
    has_replaced_forward = "forward" in vars(layer)  # an attribute of this instance
    return has_replaced_forward or bool(forward_hooks or backward_hooks)


def affine_map(linear: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the matrix (out,in) and the bias, (out,) or None, of a linear layer.

    A layer that was wrapped by an adapter, quantised or hooked is applied to the unit vectors and
    to zero, because its parameters alone do not define its output.

    Args:
        linear: nn.Linear, WNLinear, or a layer that replaces one.
        like: A tensor with the dtype and device of the computation. The matrix of a WNLinear with
            fp32 parameters has this dtype.
    """
    if type(linear) in (nn.Linear, WNLinear) and not is_hooked(linear):
        matrix = linear.matrix(like.dtype) if isinstance(linear, WNLinear) else linear.weight
        return matrix, linear.bias
    eye = torch.eye(linear.in_features, dtype=like.dtype, device=like.device)
    outputs = linear(F.pad(PROBE_SCALE * eye, (0, 0, 0, 1)))  # of the unit vectors and of zero
    return (outputs[:-1] - outputs[-1]).t() / PROBE_SCALE, outputs[-1]


class Orthogonal(nn.Module):
    """Orthogonal matrix Q = base · exp(X − Xᵀ), where X is the lower triangle of `weight` (d,d).

    Source: trivialisation, Lezcano-Casado 2019, as in torch.nn.utils.parametrizations.orthogonal.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d, d))
        self.register_buffer("base", torch.empty(d, d))

    def forward(self) -> torch.Tensor:
        """Return Q, (d,d)."""
        X = self.weight.tril()
        dtype = torch.promote_types(X.dtype, torch.float32)
        return self.base @ torch.matrix_exp((X - X.T).to(dtype)).to(self.base.dtype)


def collect_parameters(
    modules: list[nn.Module], known: tuple[type, ...]
) -> list[torch.Tensor] | None:
    """Return all parameters and buffers of modules, or None if their output depends on more.

    Args:
        modules: The modules.
        known: Classes of submodules that are allowed besides linear layers and Orthogonal.
    """
    tensors = []
    for submodule in (submodule for module in modules for submodule in module.modules()):
        is_plain = type(submodule) in (nn.Linear, WNLinear, Orthogonal) and not is_hooked(submodule)
        if not is_plain and not isinstance(submodule, known):
            return None
        tensors += submodule._parameters.values()
        tensors += submodule._buffers.values()
    return [t for t in tensors if t is not None]


class StepSize(nn.Linear):
    """Linear map from the low-rank δ to the step size Δ before its softplus.

    It multiplies in δ's dtype and adds the bias in fp32 or wider, which softplus needs.
    """

    def forward(self, delta: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(delta.dtype, torch.float32)
        return F.linear(delta, self.weight.to(delta.dtype)) + self.bias.to(dtype)


class ShortConv(nn.Conv1d):
    """Depthwise causal convolution within documents, followed by silu.

    Args:
        d: Number of channels.
        k: Width of the convolution.
        bias: Whether it has a bias.
    """

    def __init__(self, d: int, k: int, bias: bool = True) -> None:
        super().__init__(d, d, k, groups=d, padding=k - 1, bias=bias)

    def forward(
        self,
        x: torch.Tensor,
        segments: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the convolution of x (b,l,d). segments, before: as for `causal_conv`."""
        args = x, self.weight, self.bias, segments, before
        y = try_kernel("short_conv", "short_conv", x, *args)
        return F.silu(causal_conv(*args)) if y is None else y


def convolve(
    conv1d: nn.Module, x: torch.Tensor, seqs: Sequences, d_conv: int, index: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply a short convolution to a batch that may continue earlier tokens.

    Args:
        conv1d: The ShortConv.
        x: Its input (b,l,d); padding is on the right.
        seqs: Properties of the batch. The field `conv` of its state has the inputs before x.
        d_conv: Width of the convolution.
        index: Position of these inputs in `conv`, if `conv` is a tuple.

    Returns:
        silu(conv(x)) (b,l,d), and the last d_conv − 1 inputs (b,d_conv−1,d) if
        `seqs.return_state`, otherwise None.
    """
    earlier_inputs = seqs.get_state("conv", index)
    segments = None if seqs.starts is None else seqs.starts.cumsum(1)
    tail = last_valid_tokens(x, d_conv - 1, earlier_inputs, seqs) if seqs.return_state else None
    return conv1d(x, segments, earlier_inputs), tail


class RMSNorm(nn.Module):
    """RMS norm: x / rms(x) · weight, computed in fp32 or wider, returned in the weight's dtype."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        unit = F.rms_norm(x, self.weight.shape, None, self.eps)
        return unit.to(self.weight.dtype) * self.weight


class GroupNorm(nn.GroupNorm):
    """Group norm of each token's channels, (b,l,d) → (b,l,d), in fp32 or wider."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        normed = F.group_norm(wide.flatten(0, 1), self.num_groups, weight, bias, self.eps)
        return normed.view_as(wide)


class Centroids(nn.Module):
    """Learned vectors e_i. A layer reads r(y), a weighted mean of the e_i, instead of its state y.

        r(y) = Σ_i π_i e_i,    π = softmax(K y + b),

    and r(0) = 0, because only the state before the first token of a document is zero. A linear
    classifier with learned weights K and biases b decides which e_i a state belongs to. A state
    that has drifted from e_i is replaced by e_i, so small errors do not add up. There are k
    vectors. In fixed-point blocks y is sh(y), and projections read r(y). In an sLSTM y is the
    previous output, and the gates read r(y). In other layers y is the state after the previous
    token, and the recurrence continues from r(y).

    Source: state-regularised RNN (Wang & Niepert 2019, arXiv 1901.08817), here with separate keys.
    """

    def __init__(self, k: int, d: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(k, d))  # e
        self.keys = nn.Parameter(torch.empty(k, d))  # K
        self.key_bias = nn.Parameter(torch.empty(k))  # b

    def maps(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys (k,d), key_bias (k,) and vectors (k,d) in `dtype`."""
        return self.keys.to(dtype), self.key_bias.to(dtype), self.vectors.to(dtype)

    def forward(
        self, y: torch.Tensor | None, noise: torch.Tensor | None, dtype: torch.dtype = torch.float32
    ) -> Any:
        """Read states through the centroids, in fp32 or wider.

        Args:
            y: The states, (…,d); zero at the first token of a document. None: return
                `maps(dtype)` for a kernel. `Projections.readout` calls the module
                instead of `maps`, because adapters and offloading change only calls of modules.
            noise: Noise that is added to the states before they are read, (…,d), or None.
            dtype: Dtype of the maps.

        Returns:
            r(y), (…,d), in y's dtype.
        """
        if y is None:
            return self.maps(dtype)
        # The state is exactly zero only at the first token. Zero must not act as a centroid: it
        # would attract states halfway between the others.
        has_token_before = y.detach().ne(0).any(-1, keepdim=True)
        wide_dtype = torch.promote_types(y.dtype, torch.float32)
        with without_autocast(y):
            keys, key_bias, vectors = self.maps(wide_dtype)
            noisy_y = (y if noise is None else y + noise).to(wide_dtype)
            alpha = torch.softmax(F.linear(noisy_y, keys, key_bias), -1) * has_token_before
            return (alpha @ vectors).to(y.dtype)


def build_centroids(config: Any, d: int) -> Any:
    """Return new Centroids of a layer whose state has d numbers; None without `state_centroids`."""
    return Centroids(config.state_centroids, d) if config.state_centroids else None


class Projection(NamedTuple):
    """One linear projection of a block's inputs x and sh(y)."""

    name: str
    from_x: torch.Tensor  # (b,l,m) contribution of x, including the bias
    weight_y: torch.Tensor | None  # (m,d) matrix that multiplies sh(y); None if sh(y) is not read
    padding: int = 0  # number of further columns of from_x that are not part of the projection


class Projections(NamedTuple):
    """All projections of a solve in one tensor, so that one matrix product adds sh(y) to them.

    The projections that read sh(y) come first.
    """

    raw: torch.Tensor  # (b,l,m) contribution of x to all projections
    columns: dict[str, slice]  # name → its columns of raw
    weight_y: torch.Tensor  # (k,d) matrix by which sh(y) contributes to the first k columns
    centroids: Centroids | None = None  # applied to sh(y) first
    noise: torch.Tensor | None = None  # (b,l,d) added to sh(y) before the centroids

    def rows(self, y_before: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each projection by name, (b,l,·), in raw's dtype. y_before: sh(y), (b,l,d)."""
        k = len(self.weight_y)  # columns that read sh(y)
        y_names = [name for name, part in self.columns.items() if part.start < k]
        rows = {name: self.raw[..., part] for name, part in self.columns.items() if part.start >= k}
        if y_names:
            widths = [self.columns[name].stop - self.columns[name].start for name in y_names]
            rows.update(zip(y_names, self._add_y(y_before).split(widths, -1)))
        return rows

    def _add_y(self, y_before):
        """Return the first k columns of raw plus the contribution of sh(y), (b,l,k)."""
        raw, weight = self.raw[..., : len(self.weight_y)], self.weight_y
        if self.centroids is not None:
            y_before = self.centroids(y_before, self.noise)
        y_before = y_before.to(weight.dtype)
        has_one_dtype = raw.dtype == weight.dtype == product_dtype(weight)
        if is_on_cpu(raw) or not has_one_dtype:
            return raw + F.linear(y_before, weight).to(raw.dtype)
        # On a GPU: one launch for product and sum.
        columns = torch.addmm(raw.flatten(0, 1), y_before.flatten(0, 1), weight.t())
        return columns.unflatten(0, raw.shape[:2])

    def add_noise(self, noise: torch.Tensor | None) -> "Projections":
        """Return the projections with `noise` (b,l,d) added to sh(y); None adds nothing."""
        k = len(self.weight_y)
        if noise is None or not k:
            return self
        if self.centroids is not None:  # they are not linear in sh(y)
            return self._replace(noise=noise)
        from_noise = F.linear(noise.to(self.weight_y.dtype), self.weight_y).to(self.raw.dtype)
        return self._replace(raw=self.raw + F.pad(from_noise, (0, self.raw.shape[-1] - k)))

    def readout(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...] | None:
        """Return the fields of a Readout (lm/kernels/cell_arguments.py); None without centroids."""
        if self.centroids is None:
            return None
        noise = None if self.noise is None else self.noise.to(dtype)
        return *self.centroids(None, None, dtype), noise

    def cut(self, start: int, end: int) -> "Projections":
        """Return the projections of the tokens start ≤ t < end."""
        noise = None if self.noise is None else self.noise[:, start:end]
        return self._replace(raw=self.raw[:, start:end], noise=noise)


def join_projections(
    projections: Iterable[Projection], width: int, dtype: torch.dtype, cache: Any = None
) -> Projections:
    """Join projections into one Projections.

    Args:
        projections: The projections, in any order.
        width: Number of channels d of sh(y).
        dtype: Dtype of raw.
        cache: A state.WeightCache for the joined matrix, or None.
    """
    ordered = sorted(projections, key=lambda projection: projection.weight_y is None)
    weights = []
    for _, _, weight_y, padding in ordered:
        if weight_y is not None:
            weights += [weight_y, weight_y.new_zeros(padding, width)] if padding else [weight_y]
    missing = -sum(map(len, weights)) % 8
    if missing and not is_on_cpu(weights[0]):  # tensor cores are only fast with multiples of 8
        zeros_x = ordered[0].from_x.new_zeros(*ordered[0].from_x.shape[:-1], missing)
        zeros_y = weights[0].new_zeros(missing, width)
        y_count = sum(projection.weight_y is not None for projection in ordered)
        ordered.insert(y_count, Projection("padding", zeros_x, zeros_y))
        weights.append(zeros_y)
    raw = torch.cat([projection.from_x.to(dtype) for projection in ordered], -1)
    columns, start = {}, 0
    for name, from_x, _, padding in ordered:
        end = start + from_x.shape[-1]
        columns[name] = slice(start, end - padding)
        if padding:
            columns[f"padding of {name}"] = slice(end - padding, end)
        start = end
    if not weights:
        return Projections(raw, columns, raw.new_zeros(0, width))

    def join_weights():
        weight = torch.cat(weights)
        is_too_wide = weight.dtype.itemsize > dtype.itemsize
        return weight.to(dtype) if is_too_wide else weight

    # With a kernel, the mixer's rows (Mixer.merge_extra) and the dtype differ.
    cache_key = "weight_y", dtype, sum(map(len, weights))
    return Projections(raw, columns, cached(cache, cache_key, join_weights))
