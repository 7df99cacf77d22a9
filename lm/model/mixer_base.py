"""`Mixer`, the base class of channel mixers, and their registry: `@mixer("name")`.

A mixer reads an argument P of every token, (…,p): the token's input x, and with `mixer_h_dep` also
the output y of the token before. Its linear map gives raw = P Wᵀ + bias, (…,m), and from raw it
computes M(P; v) = Q v. docs/extending.md shows how to write a mixer of your own.

Shape suffixes: d channels (d_inner), p width of P, m width of raw.
"""

import copy
import difflib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# Name → class.
MIXERS: dict[str, type["Mixer"]] = {}

# Methods that a subclass must define → their signatures.
REQUIRED_METHODS = {"weights": "weights(self, like)", "forward": "forward(self, raw, v, weights)"}


class MixerError(ValueError):
    """A mixer that is unknown, cannot be registered, or cannot be built for a layer."""


class MixerWeights(NamedTuple):
    """Weights of a mixer's linear map raw = P Wᵀ + bias, computed once per solve."""

    matrix: torch.Tensor  # W (m,p); m may be 0
    bias: torch.Tensor  # (m,)
    extra: tuple = ()  # further tensors of the mixer that do not depend on the token


class ReflectionOptions(NamedTuple):
    """Options by which a compiled kernel computes the mixer of `mixers.Reflections`."""

    rank: int  # number r of reflections
    scale: float  # factor k of the gates
    act: str  # activation of the vectors
    is_sequential: bool  # True: householder; False: dplr
    eps: float  # floor of the norms by which the vectors are divided
    kappa: float | None = None  # bound κ of `mixers.Contractive`; None without a bound


def norm_bound(matrices: torch.Tensor) -> torch.Tensor:
    """Return √(‖A‖₁ ‖A‖_∞), which is at least ‖A‖₂, of matrices A (…,m,n); shape (…)."""
    entries = matrices.abs()
    return (entries.sum(-1).amax(-1) * entries.sum(-2).amax(-1)).sqrt()


class Mixer(nn.Module):
    """Channel mixer M(P; v) = Q v, linear in v, with a matrix Q that depends only on P.

    A subclass must define

    - `__init__(self, d_inner, d_arg)`, or `from_config` if it reads further fields. It sets
      `d_inner` (d) and `out_features` (m, the width of raw). d_arg is p, the width of P.
    - `weights(self, like)`, which returns its MixerWeights.
    - `forward(self, raw, v, weights)`, which returns M(P; v). Leading dimensions broadcast: one raw
      may come with many v.

    and may define

    - `flops_per_token`, the cost of M(P; v), and `bound`, an upper bound of ‖I − Q‖.
    - `has_low_rank = True` and `low_rank`, which returns I − Q in factors, so that a token's
      equation has as many unknowns as the rank. Otherwise the unknown is y. The gradient is exact
      either way.
    - `gates`, which `fprnn inspect` draws.
    - `kernel_options`, with which a compiled kernel computes the mixer.
    """

    out_features = 0
    has_low_rank = False

    @classmethod
    def from_config(cls, config: Any, d_inner: int, d_arg: int) -> "Mixer":
        """Build the mixer of a layer.

        Args:
            config: FPRNNConfig of the layer.
            d_inner: Number of channels d.
            d_arg: Width p of P.

        Raises:
            ValueError: If the mixer cannot have these sizes. The message begins with the name of
                the field.
        """
        return cls(d_inner, d_arg)

    def weights(self, like: torch.Tensor) -> MixerWeights:
        """Return the MixerWeights; like: a tensor with the dtype and device of the computation."""
        raise NotImplementedError

    def merge_extra(self, weights: MixerWeights) -> MixerWeights:
        """Return equal weights without `extra`, for a compiled kernel, which does not read it."""
        return weights

    def forward(self, raw: torch.Tensor, v: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        """Return M(P; v), (…,d), for raw (…,m) and v (…,d)."""
        raise NotImplementedError

    def flops_per_token(self) -> int:
        """Return the FLOPs of M(P; v) without P Wᵀ; default: of a product with a full matrix."""
        return 2 * self.d_inner**2

    def low_rank(self, raw: torch.Tensor, weights: MixerWeights) -> Any:
        """Return I − Q of every token as a `cell.LowRank`, or None, for raw (…,m)."""
        return None

    def kernel_options(self) -> ReflectionOptions | None:
        """Return the options of a compiled kernel, or None if no kernel supports the mixer."""
        return None

    def gates(self, raw: torch.Tensor) -> torch.Tensor | None:
        """Return the gates of every token, in (0, 1), or None if it has no gates."""
        return None

    def mix(
        self, raw: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weights: MixerWeights
    ) -> torch.Tensor:
        """Return Q x + (I − Q) y = M(P; x − y) + y, (…,d), for raw (…,m), x and y (…,d)."""
        return self(raw.to(x.dtype), x - y, weights) + y

    def bound(self, raw: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        """Return an upper bound of ‖I − Q‖₂, (…,1): the `norm_bound` of the matrix I − Q."""
        eye = torch.eye(self.d_inner, dtype=raw.dtype, device=raw.device)
        return norm_bound(eye - self.dense(raw, weights)).unsqueeze(-1)

    def dense(self, raw: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        """Return Q as a matrix (…,d,d), by applying M to the d unit vectors."""
        eye = torch.eye(self.d_inner, dtype=raw.dtype, device=raw.device)
        columns = self(raw.unsqueeze(-2), eye.expand(*raw.shape[:-1], -1, -1), weights)
        return columns.transpose(-1, -2)

    def matrix(self, P: torch.Tensor) -> torch.Tensor:
        """Return Q as a matrix (…,d,d), for P (…,p)."""
        weights = self.weights(P)
        return self.dense(F.linear(P, weights.matrix, weights.bias), weights)


def mixer(*names: str) -> Callable[[type["Mixer"]], type["Mixer"]]:
    """Return a decorator that registers a subclass of Mixer under these names.

    A configuration selects the mixer by such a name (`model.mixer`). Classes outside this folder
    are also registered under `module:Class`.

    Raises:
        MixerError: If the class is no Mixer or lacks a method, or another class has the name.
    """

    def decorate(cls):
        for name in names if is_built_in(cls) else (*names, class_path(cls)):
            register(name, cls)
        return cls

    return decorate


def register(name: str, cls: type["Mixer"]) -> None:
    """Register a subclass of Mixer for `model.mixer: name`.

    Raises:
        MixerError: As for `mixer`.
    """
    _check_class(cls)
    other = MIXERS.get(name)
    if other is not None and class_path(other) != class_path(cls):
        raise MixerError(
            f"mixer `{name}` is already {class_path(other)}: register {class_path(cls)} under"
            " another name"
        )
    MIXERS[name] = cls


def class_path(cls: type) -> str:
    """Return `module:Class` of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_built_in(cls: type) -> bool:
    """Return whether the file of a class is in this folder."""
    return cls.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def _check_class(cls):
    """Raise a MixerError if a class cannot be registered."""
    if not (isinstance(cls, type) and issubclass(cls, Mixer)):
        raise MixerError(
            f"{getattr(cls, '__qualname__', cls)} is not a mixer: it must be a subclass of"
            " lm.model.mixer_base.Mixer"
        )
    missing = [
        signature
        for name, signature in REQUIRED_METHODS.items()
        if getattr(cls, name) is getattr(Mixer, name)
    ]
    if missing:
        raise MixerError(
            f"{class_path(cls)} does not define {' and '.join(missing)}: a mixer must define"
            f" {' and '.join(REQUIRED_METHODS.values())} (docs/extending.md)"
        )
    has_default_from_config = cls.from_config.__func__ is Mixer.from_config.__func__
    if has_default_from_config:  # it calls cls(d_inner, d_arg)
        try:
            inspect.signature(cls).bind(1, 1)
        except TypeError as e:
            raise MixerError(
                f"{class_path(cls)} cannot be called as {cls.__name__}(d_inner, d_arg) ({e}):"
                " define __init__(self, d_inner, d_arg), or a classmethod from_config(cls, config,"
                " d_inner, d_arg)"
            ) from None
    if cls.has_low_rank and cls.low_rank is Mixer.low_rank:
        raise MixerError(
            f"{class_path(cls)} has has_low_rank = True but no method low_rank(self, raw,"
            " weights): define it, or leave has_low_rank False"
        )


def build_named_mixer(name: str, config: Any, d_inner: int, d_arg: int, **fields: Any) -> Mixer:
    """Build a registered mixer for a layer.

    Args:
        name: Name in MIXERS.
        config: FPRNNConfig of the layer.
        d_inner: Number of channels d.
        d_arg: Width p of P.
        **fields: Fields of the config to replace.

    Raises:
        MixerError: If there is no such mixer, it cannot have these sizes, or its class built
            something that is not a mixer of this layer.
    """
    if name not in MIXERS:
        raise MixerError(_describe_unregistered(name))
    if fields:
        config = copy.copy(config)
        for field, value in fields.items():
            setattr(config, field, value)
    if is_built_in(MIXERS[name]):  # FPRNNConfig has checked the sizes
        return MIXERS[name].from_config(config, d_inner, d_arg)
    try:
        module = MIXERS[name].from_config(config, d_inner, d_arg)
    except ValueError as e:
        raise MixerError(f"mixer `{name}`: {e}") from e
    _check_module(module, name, d_inner, d_arg)
    return module


def _describe_unregistered(name):
    if ":" not in str(name):
        choices = [registered for registered in MIXERS if ":" not in registered]
        # With difflib's default cutoff, 0.6, `dense` would not suggest `selective_dense`.
        matches = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.4)
        hint = f"; did you mean `{matches[0]}`?" if matches else ""
        return f"unknown mixer `{name}`: it must be one of {', '.join(choices)}{hint}"
    return (
        f"mixer `{name}` is not registered: the configuration of a model imports no module. Import"
        f" {str(name).partition(':')[0]}, whose class is decorated with @mixer, before building the"
        " model, or load the checkpoint with the code in its folder (trust_remote_code=True)"
    )


def _check_module(module, name, d_inner, d_arg):
    """Raise a MixerError for mistakes that would fail in a forward pass or load wrong weights."""
    if not isinstance(module, Mixer):
        raise MixerError(
            f"mixer `{name}`: from_config returned a {type(module).__name__}, not a Mixer"
        )
    if getattr(module, "d_inner", None) != d_inner:
        raise MixerError(
            f"mixer `{name}`: its d_inner is {getattr(module, 'd_inner', 'missing')}: __init__ must"
            f" set self.d_inner = d_inner, here {d_inner}"
        )
    with torch.no_grad():
        like = next(module.parameters(), torch.zeros(1))
        weights = module.weights(like)
    shapes = tuple(weights.matrix.shape), tuple(weights.bias.shape)
    expected = (module.out_features, d_arg), (module.out_features,)
    if shapes != expected:
        raise MixerError(
            f"mixer `{name}`: weights(like) returns a map and a bias of shapes {shapes}: with"
            f" out_features = {module.out_features} and d_arg = {d_arg} they must be {expected}"
        )
