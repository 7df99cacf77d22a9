"""What crosses from one token to the next, and from one segment of a long stream to the next.

Noise on sh(y) in training too: what survives it has learnt to pull a state back.

Shape suffixes: b batch, l length, d channels, k d_conv.
"""

import contextlib
import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class BlockState(NamedTuple):
    """What one block leaves behind after a row's last token that is no padding; no gradient."""

    y: torch.Tensor  # (b,d) y*: sh(y) of the next token
    f_y: torch.Tensor  # (b,d) the iterate that the output was computed from
    h: torch.Tensor  # the scan's state: FP-Mamba-1 (b,d,n), FP-Mamba-2 (b,h,p,n), FP-RNN (b,d)
    conv: tuple[torch.Tensor, ...]  # (b,k−1,·) the last inputs of the convolutions; () without


def state_shapes(config: Any) -> list[tuple[int, ...]]:
    """Shapes, without b, of the tensors in a BlockState of such a block."""
    d, n, bc = config.d_inner, config.d_state, 2 * config.ngroups * config.d_state
    h, convs = {
        "fp_mamba1": ((d, n), (d,)),
        "fp_mamba2": ((d // config.headdim, config.headdim, n), (d + bc,)),
        "fp_rnn": ((d,), (d, 2 * d)),
    }[config.block]
    tails = ((config.d_conv - 1, width) for width in convs if config.use_short_conv)
    return [(d,), (d,), h, *tails]


def tensors_of(layer: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that a layer's state is made of."""
    nested = (field if isinstance(field, tuple) else (field,) for field in layer)
    return [tensor for fields in nested for tensor in fields]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], nested: Any) -> Any:
    """Apply a function to every tensor in tuples of tuples, named or not."""
    if torch.is_tensor(nested):
        return function(nested)
    if not isinstance(nested, tuple):
        return nested
    parts = [map_tensors(function, part) for part in nested]
    return type(nested)(*parts) if hasattr(nested, "_fields") else tuple(parts)


def _fits(found, shape):
    return len(found) == len(shape) and all(n in (m, -1) for m, n in zip(found, shape))


class FPRNNState(NamedTuple):
    """Where a forward pass ended, so that the next segment of the same streams can start there."""

    layers: tuple[Any, ...]  # a BlockState of every fixed-point block; each kind its own
    # (b,), −1 where a row had none, or an embedding that is no EOS token's; None: unknown
    last_token: torch.Tensor | None

    def check(self, batch: int, expected: list[list[tuple[int, ...]]]) -> None:
        """Raise a ValueError unless this is the state of `batch` streams and of a model with such
        layers. expected: what each layer's `state_shapes` gives."""
        if len(self.layers) != len(expected):
            raise ValueError(
                f"the state is of a model with {len(self.layers)} layers, this one has"
                f" {len(expected)}"
            )
        for index, (layer, shapes) in enumerate(zip(self.layers, expected)):
            found = [tuple(t.shape[1:]) for t in tensors_of(layer)]
            same = len(found) == len(shapes) and all(map(_fits, found, shapes))
            if not same:
                raise ValueError(
                    f"the state is of another model: layer {index} has left {found} for each"
                    f" stream, where this one's leaves {shapes} (−1: any number)"
                )
            rows = {len(t) for t in tensors_of(layer)}
            if rows - {batch}:
                raise ValueError(f"the state is of a batch of {rows.pop()}, the input's is {batch}")

    @property
    def streams(self) -> torch.Tensor:
        """A number for each stream, (b,), on the state's device."""
        first = next(t for layer in self.layers for t in tensors_of(layer))
        return torch.arange(len(first), device=first.device)

    def select(self, rows: torch.Tensor) -> "FPRNNState":
        """The state of these rows (k,) of the batch."""
        return map_tensors(lambda t: t[rows], self)


class FPRNNCache:
    """What `generate` carries from one forward pass to the next: an FPRNNState, of a size that does
    not grow with the text (that of attention does). A forward pass of k ≥ 1
    tokens with it goes on exactly where the one before has ended."""

    state: Any  # FPRNNState | None
    is_compileable = False
    is_croppable = False  # a recurrence cannot go back
    is_linear = (False,)  # transformers 5.24: it knows its length, by which a prompt is cut

    def __init__(self, state: FPRNNState | None = None, length: int = 0) -> None:
        self.state, self.length = state, length
        self._weight_caches: dict[int, WeightCache] = {}  # of every layer

    def weight_cache(self, layer: int) -> "WeightCache":
        """The WeightCache of a layer."""
        return self._weight_caches.setdefault(layer, WeightCache())

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is loaded elsewhere, has other parameters."""
        return {**vars(self), "_weight_caches": {}}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: row i goes on from the state of row beam_idx[i]."""
        self.state = self.state.select(beam_idx.to(self.state.streams.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = self.state.select(self.state.streams.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def crop(self, max_length: int) -> None:
        raise ValueError(
            f"a recurrent cache cannot be cropped (to {max_length} tokens): its state has no memory"
            " of earlier ones. Read the shorter text again, with a new cache"
        )


class WeightCache:
    """What a block makes of its parameters alone (materialised and joined weights), kept from one
    pass with a cache to the next as long as these stay as they are."""

    _marks: Any
    _views: Any
    _made: dict[Hashable, Any]

    def __init__(self) -> None:
        self._marks, self._views, self._made = None, (), {}

    def valid_for(self, parameters: list[torch.Tensor] | None) -> "WeightCache | None":
        """This, emptied where a parameter is not as it was; None where nothing may be kept.

        parameters: of which things are made; None: of something else as well.
        """
        if parameters is None or torch.is_grad_enabled():
            return None
        if any(t.is_inference() for t in parameters):  # these do not count their changes
            return None
        marks = [(t.data_ptr(), t._version, t.dtype) for t in parameters]
        if marks != self._marks:
            # The views keep what is written elsewhere from lying at the same address.
            self._marks, self._views = marks, [t.detach() for t in parameters]
            self._made = {}
        return self

    def get_or_make(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What `make()` gives, or gave before."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def cached(kept: WeightCache | None, name: Hashable, make: Callable[[], Any]) -> Any:
    """`kept.get_or_make`, where something may be kept. kept: WeightCache or None."""
    return make() if kept is None else kept.get_or_make(name, make)


def draw(
    sample: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    device: torch.device,
    generators: list[torch.Generator] | None,
) -> torch.Tensor:
    """Draw random numbers for a batch.

    Args:
        sample: torch.randn or torch.rand.
        shape: (b,…).
        device: of the result and of the generators.
        generators: One for each sequence, so that its numbers do not depend on the batch that it is
            in. None: torch's own generator, for the batch as a whole.
    """
    if generators is None:
        return sample(shape, device=device)
    if len(generators) != shape[0]:
        raise ValueError(f"{len(generators)} generators for {shape[0]} sequences")
    return torch.stack([sample(shape[1:], device=device, generator=g) for g in generators])


def draw_state_noise(
    block: Any,
    u: torch.Tensor,
    sigma: float,
    generators: list[torch.Generator] | None,
) -> torch.Tensor | None:
    """Draw the `state_noise` of a block: N(0, s²), with s drawn from U[0, σ] for every sequence.

    Args:
        block: The fixed-point block.
        u: (b,l,d_model), its input.
        sigma: σ, in units of the vector that the block's norm makes.
        generators: As in `draw`.

    Returns:
        (b,l,d_inner), or None for σ = 0.
    """
    if not sigma:
        return None
    noise = draw(torch.randn, (*u.shape[:2], block.config.d_inner), u.device, generators)
    return sigma * draw(torch.rand, (len(u), 1, 1), u.device, generators) * noise


class SolveOptions(NamedTuple):
    """How the layers solve in one pass of the model."""

    settings: Any = None  # a config whose solver fields hold; None: the block's own
    draw_noise: Callable[..., torch.Tensor | None] = draw_state_noise  # an Adversary has its own
    generators: list[torch.Generator] | None = None  # of the noise, one for each sequence: `draw`
    solve_context: Callable[[], AbstractContextManager[Any]] = nullcontext  # around each solve


class Sequences(NamedTuple):
    """What is known of the tokens besides their embedding, and how a block is to solve; a None
    means 'nothing special'."""

    mask: torch.Tensor | None = None  # (b,l) bool, False at padding: a step there changes no state
    starts: torch.Tensor | None = None  # (b,l) bool, True at the first token of a packed document
    # A block that starts from a state, or is to return one, wants padding on the right.
    state: BlockState | None = None  # what the tokens before the first left behind
    return_state: bool = False  # the block returns its BlockState as well
    noise: torch.Tensor | None = None  # (b,l,d) added to sh(y) where it is read (`state_noise`)
    cache: WeightCache | None = None  # what the block need not make of its parameters again
    options: SolveOptions = SolveOptions()
    adjoint_norm: torch.Tensor | None = None  # (b,) which the backward fills: FixedPointStats

    def get_state(self, name: str, index: int | None = None) -> Any:
        """A field of the state to start from (of a tuple: its index-th), None without a state."""
        value = None if self.state is None else getattr(self.state, name)
        return value if value is None or index is None else value[index]

    def cut(self, start: int, end: int, state: Any) -> "Sequences":
        """Of the tokens start ≤ t < end, which go on from the state."""
        mask, starts = (None if t is None else t[:, start:end] for t in (self.mask, self.starts))
        return Sequences(mask, starts, state, options=self.options)

    def zero_padding(self, x: torch.Tensor) -> torch.Tensor:
        """x, zero at padding. x: (b,l,·)"""
        return x if self.mask is None else x * self.mask.unsqueeze(-1)


def shift(y: torch.Tensor, seqs: Sequences, name: str = "y") -> torch.Tensor:
    """sh(y)[t] = y[t−1]; at t = 0 the state's field `name`, zero without a state; zero at the first
    token of every packed document."""
    before = seqs.get_state(name)
    first = torch.zeros_like(y[:, :1]) if before is None else before.to(y.dtype).unsqueeze(1)
    y = torch.cat([first, y[:, :-1]], 1)
    return y if seqs.starts is None else y.masked_fill(seqs.starts.unsqueeze(-1), 0)


def gather_tokens(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x (b,l,…) at the positions `at` (b,k) of each row: (b,k,…)."""
    return x.take_along_dim(at.reshape(*at.shape, *[1] * (x.dim() - 2)), 1)


def last_valid_tokens(
    x: torch.Tensor, n: int, before: torch.Tensor | None, seqs: Sequences
) -> torch.Tensor:
    """The last n positions of each row that are not padding, zero where another document's.

    Args:
        x: (b,l,…), padded on the right where seqs.mask says so.
        before: (b,n,…) the positions before x; zero if None.
    Returns:
        (b,n,…), detached, and a copy: keeping it does not keep x.
    """
    x = x.detach()
    if seqs.mask is None and seqs.starts is None and n <= x.shape[1]:
        return x[:, x.shape[1] - n :].clone()
    before = x.new_zeros(x.shape[0], n, *x.shape[2:]) if before is None else before.to(x.dtype)
    joined = torch.cat([before, x], 1)
    if seqs.mask is None and seqs.starts is None:
        return joined[:, x.shape[1] :].clone()
    if seqs.mask is None:
        at = torch.arange(x.shape[1], x.shape[1] + n, device=x.device).expand(x.shape[0], n)
    else:
        at = seqs.mask.sum(1, keepdim=True) + torch.arange(n, device=x.device)
    tail = gather_tokens(joined, at)
    if seqs.starts is None or n == 0:
        return tail
    # `before` is of the document that the first token goes on with, unless that one starts another.
    document = F.pad(seqs.starts.long().cumsum(1), (n, 0))
    document = gather_tokens(document, at)
    alive = document == document[:, -1:]
    return tail * alive.reshape(*alive.shape, *[1] * (tail.dim() - 2))


def padding_to_the_right(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of positions that puts padding behind the tokens, and the order that undoes it.

    mask: (b,l) bool → two (b,l), to be used with `gather_tokens`.
    """
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    return order, order.argsort(1)


class Adversary:
    """State noise against the loss: a second pass over the same tokens has in every block, beside
    the first one's noise, a vector along the first loss's gradient there. (The step of Goodfellow
    et al. 2015, eq. 1, on the state in place of the input, by its 2-norm.)

        with adversary.first_pass():
            loss = ...
        loss.backward()
        with adversary.second_pass():
            worse = ...
        worse.backward()

    Args:
        model: in training mode, with fixed-point layers.
        size: the most that a token's vector is long, of √d_inner, the length of what the block's
            norm makes; every sequence draws its own from U[0, size].
    """

    def __init__(self, model: Any, size: float) -> None:
        self.model, self.size = model, size
        self.noise: dict[Any, torch.Tensor] = {}

    def first_pass(self) -> contextlib.AbstractContextManager[None]:
        """The context of the first pass: every block's noise is kept, with its gradient."""
        self.noise.clear()
        return self.model.passes(draw_noise=self._kept)

    def second_pass(self) -> contextlib.AbstractContextManager[None]:
        """The context of the second, after the backward of the first."""
        return self.model.passes(draw_noise=self._against)

    def _kept(self, block, u, sigma, generators):
        noise = draw_state_noise(block, u, sigma, generators)
        if noise is None:
            noise = torch.zeros(*u.shape[:2], block.config.d_inner, device=u.device)
        self.noise[block] = noise.requires_grad_()
        return noise

    def _against(self, block, u, sigma, generators):
        noise = self.noise[block]
        if noise.grad is None:
            raise RuntimeError("the second pass needs the backward of the first")
        length = torch.linalg.vector_norm(noise.grad, dim=-1, keepdim=True)
        worst = noise.grad / length.clamp_min(torch.finfo(length.dtype).tiny)
        share = draw(torch.rand, (len(u), 1, 1), u.device, generators)
        return noise.detach() + self.size * math.sqrt(noise.shape[-1]) * share * worst
