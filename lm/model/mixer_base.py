"""What a channel mixer is, and the register of those there are: `@mixer("name")`.

docs/extending.md has a mixer of one's own from beginning to end.

Shape suffixes: b batch, l length, d channels (d_inner), p width of P, m outputs of the mixer's map.
"""

import copy
import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# Name → class: the built-in ones, and those that were registered since.
MIXERS: dict[str, type["Mixer"]] = {}

# What a subclass must define, and how it is called.
METHODS = {"weights": "weights(self, like)", "forward": "forward(self, raw, v, weights)"}


class MixerError(ValueError):
    """A mixer that is not known, cannot be registered, or cannot be made for a layer."""


class MixerWeights(NamedTuple):
    """A mixer's linear map, materialised once per solve."""

    first: torch.Tensor  # (m, p): P → the m first-layer outputs; m may be 0
    bias: torch.Tensor  # (m,)
    extra: tuple = ()  # what else the mixer needs that does not depend on the token


def bound_of(matrices: torch.Tensor) -> torch.Tensor:
    """√(‖·‖₁ ‖·‖_∞) ≥ ‖·‖₂. matrices: (…,m,n) → (…)"""
    entries = matrices.abs()
    return (entries.sum(-1).amax(-1) * entries.sum(-2).amax(-1)).sqrt()


class Mixer(nn.Module):
    """A channel mixer: M(P; v) = Q_t v, linear in v, for a matrix Q_t that depends on P alone.

    A subclass must define
        `__init__(self, d_inner, d_arg)`, or `from_config` where it reads more; it sets `d_inner`
        (d) and `out_features` (m, of its layers as they are). d_arg is p, the width of P.
        `weights(self, like)` → its MixerWeights. like: see `layers.affine_map`.
        `forward(self, raw, v, weights)` → M(P; v), (…,d), of raw = P Wᵀ + bias (…,m) and v (…,d).
        Leading dimensions are free and broadcast: one raw may be given with many v.
    and may define
        `from_config`: how it is made from the model's configuration.
        `flops_per_token`: what one M(P; v) costs; `bound`: how far Q_t is from the identity.
        `has_low_rank = True` and `low_rank`: I − Q_t in the form that a token's own equation is
        solved by in closed form. Without it y itself is iterated, with Q_t held fixed; both have
        the exact gradient.
        `gates`: what `fprnn inspect` draws of it.
        `reflections`: what a compiled kernel needs.
    """

    out_features = 0
    has_low_rank = False

    @classmethod
    def from_config(cls, config: Any, d_inner: int, d_arg: int) -> "Mixer":
        """The mixer of a model.

        Args: config: the FPRNNConfig of the layer. d_inner: d. d_arg: p.
        Raises:
            ValueError: sizes that it cannot have; the message begins with the field's name.
        """
        return cls(d_inner, d_arg)

    def weights(self, like: torch.Tensor) -> MixerWeights:
        """The MixerWeights of the parameters as they are. like: see `layers.affine_map`."""
        raise NotImplementedError

    def merged(self, weights: MixerWeights) -> MixerWeights:
        """The weights as a compiled cell reads them, which knows no second layer."""
        return weights

    def forward(self, raw: torch.Tensor, v: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        """M(P; v) (…,d). raw: (…,m) = P Wᵀ + bias. v: (…,d)."""
        raise NotImplementedError

    def flops_per_token(self) -> int:
        """FLOPs of one M(P; v) given P Wᵀ, a multiply-add counting two: here those of a product
        with a full matrix, which are those of few mixers."""
        return 2 * self.d_inner**2

    def low_rank(self, raw: torch.Tensor, weights: MixerWeights) -> Any:
        """I − Q as a LowRank of every token; None: it has no low rank. raw: (…,m)"""
        return None

    def reflections(self) -> tuple[Any, ...] | None:
        """What a kernel needs to know of a low-rank mixer that reads its vectors directly: (r, k,
        activation, whether one follows the other, eps, κ or None). None: it is none."""
        return None

    def gates(self, raw: torch.Tensor) -> torch.Tensor | None:
        """Its gates a_t = σ(·) of every token, (…,·); None: it has none. raw: (…,m)"""
        return None

    def mix(
        self,
        raw: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        weights: MixerWeights,
    ) -> torch.Tensor:
        """x̃ = Q x + (I − Q) y = M(P; x − y) + y (…,d). raw: (…,m) = P Wᵀ + b. x, y: (…,d)."""
        return self(raw.to(x.dtype), x - y, weights) + y

    def bound(self, raw: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        """An upper bound of ‖I − Q‖₂, (…,1): √(‖·‖₁ ‖·‖_∞) of the matrix, in d applications."""
        eye = torch.eye(self.d_inner, dtype=raw.dtype, device=raw.device)
        return bound_of(eye - self.dense(raw, weights)).unsqueeze(-1)

    def dense(self, raw: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        """Q as a matrix (…,d,d), in d applications. raw: (…,m)"""
        eye = torch.eye(self.d_inner, dtype=raw.dtype, device=raw.device)
        rows = self(raw.unsqueeze(-2), eye.expand(*raw.shape[:-1], -1, -1), weights)
        return rows.transpose(-1, -2)

    def matrix(self, P: torch.Tensor) -> torch.Tensor:
        """Q_t = M(P; ·) as a matrix. P: (…,p) → (…,d,d)."""
        weights = self.weights(P)
        return self.dense(F.linear(P, weights.first, weights.bias), weights)


# The register.


def mixer(*names: str) -> Callable[[type["Mixer"]], type["Mixer"]]:
    """A decorator that registers a subclass of Mixer under these names, which `model.mixer` may
    then have; one that is not of this folder also under `module:Class`.

    Raises:
        MixerError: what is decorated is no Mixer, or lacks a method; a name that another has.
    """

    def decorated(cls):
        for name in names if is_built_in(cls) else (*names, place_of(cls)):
            register(name, cls)
        return cls

    return decorated


def register(name: str, cls: type["Mixer"]) -> None:
    """Have `model.mixer: name` stand for a subclass of Mixer.

    Raises:
        MixerError: as `mixer`.
    """
    _check_class(cls)
    other = MIXERS.get(name)
    if other is not None and place_of(other) != place_of(cls):
        raise MixerError(
            f"mixer `{name}` is {place_of(other)} already: register {place_of(cls)} under another"
            " name"
        )
    MIXERS[name] = cls


def place_of(cls: type) -> str:
    """`module:Class`, where a class is."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_built_in(cls: type) -> bool:
    """Whether a class is in a file beside this one."""
    return cls.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def _check_class(cls):
    if not (isinstance(cls, type) and issubclass(cls, Mixer)):
        raise MixerError(
            f"{getattr(cls, '__qualname__', cls)} is no mixer: it must be a class derived from"
            " Mixer, of lm.model.mixer_base"
        )
    missing = [call for name, call in METHODS.items() if getattr(cls, name) is getattr(Mixer, name)]
    if missing:
        raise MixerError(
            f"{place_of(cls)} has no method {' and none '.join(missing)}: a mixer must define"
            f" {' and '.join(METHODS.values())} (docs/extending.md)"
        )
    if cls.from_config.__func__ is Mixer.from_config.__func__:
        try:
            inspect.signature(cls).bind(1, 1)
        except TypeError as e:
            raise MixerError(
                f"{place_of(cls)} cannot be made as {cls.__name__}(d_inner, d_arg) ({e}): give it"
                " __init__(self, d_inner, d_arg), or a classmethod from_config(cls, config,"
                " d_inner, d_arg)"
            ) from None
    if cls.has_low_rank and cls.low_rank is Mixer.low_rank:
        raise MixerError(
            f"{place_of(cls)} says has_low_rank and has no method low_rank(self, raw, weights):"
            " define it, or leave has_low_rank False"
        )


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A sentence on a name that is not known, with the nearest that is."""
    near = difflib.get_close_matches(str(name), list(known), 1, 0.4)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"unknown {what} `{name}`: one of {', '.join(known)}{hint}"


def named_mixer(name: str, config: Any, d_inner: int, d_arg: int, **fields: Any) -> Mixer:
    """The registered mixer of a name, made for a layer. fields: of the config, which are others.

    Raises:
        MixerError: no such mixer; sizes that it cannot have; what the class makes is none.
    """
    if name not in MIXERS:
        raise MixerError(_not_registered(name))
    if fields:
        config = copy.copy(config)
        for field, value in fields.items():
            setattr(config, field, value)
    if is_built_in(MIXERS[name]):
        return MIXERS[name].from_config(config, d_inner, d_arg)
    try:
        made = MIXERS[name].from_config(config, d_inner, d_arg)
    except ValueError as e:
        raise MixerError(f"mixer `{name}`: {e}") from e
    _check_made(made, name, d_inner, d_arg)
    return made


def _not_registered(name):
    if ":" not in str(name):
        return unknown("mixer", name, [known for known in MIXERS if ":" not in known])
    return (
        f"mixer `{name}` is not registered: a model's configuration imports no module. Import"
        f" {str(name).partition(':')[0]}, whose class is decorated with @mixer, before the model is"
        " made; or load the checkpoint with the code that travels with it (trust_remote_code=True)"
    )


def _check_made(made, name, d_inner, d_arg):
    """Say now, by name, what would fail in the middle of a forward pass, or be loaded wrongly."""
    if not isinstance(made, Mixer):
        raise MixerError(f"mixer `{name}`: from_config made a {type(made).__name__}, no Mixer")
    if getattr(made, "d_inner", None) != d_inner:
        raise MixerError(
            f"mixer `{name}`: its d_inner is {getattr(made, 'd_inner', 'missing')}: __init__ must"
            f" set self.d_inner = d_inner, here {d_inner}"
        )
    with torch.no_grad():
        weights = made.weights(next(made.parameters(), torch.zeros(1)))
    shapes = tuple(weights.first.shape), tuple(weights.bias.shape)
    wanted = (made.out_features, d_arg), (made.out_features,)
    if shapes != wanted:
        raise MixerError(
            f"mixer `{name}`: weights(like) gives a map and a bias of shapes {shapes}: with"
            f" out_features = {made.out_features} and d_arg = {d_arg} they must be {wanted}"
        )
