"""State between tokens and between segments of a stream, caches, and noise on the state.

`Sequences` carries all of them to the layers. Noise in training makes a model pull perturbed states
back. sh(y) is the y of the token before each token.

Shape suffixes: b batch, l length, d channels (d_inner), k d_conv.
"""

import contextlib
import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class BlockState(NamedTuple):
    """State of a fixed-point block after each row's last token that is not padding; detached."""

    y: torch.Tensor  # (b,d) y*, which the next token reads as sh(y)
    f_y: torch.Tensor  # (b,d) the iterate that the output was computed from: y* or f(y*)
    h: torch.Tensor  # recurrence's state, (b,·) + `state_shapes`
    conv: tuple[torch.Tensor, ...]  # (b,k−1,·) last inputs of each convolution


def state_shapes(config: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in a block's BlockState, without the batch dimension."""
    d, n, bc = config.d_inner, config.d_state, 2 * config.ngroups * config.d_state
    h_shape, conv_widths = {
        "fp_mamba1": ((d, n), (d,)),
        "fp_mamba2": ((d // config.headdim, config.headdim, n), (d + bc,)),
        "fp_rnn": ((d,), (d, 2 * d)),
    }[config.block]
    tails = ((config.d_conv - 1, width) for width in conv_widths if config.use_short_conv)
    return [(d,), (d,), h_shape, *tails]


def list_tensors(layer: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors of a layer's state."""
    nested = (field if isinstance(field, tuple) else (field,) for field in layer)
    return [tensor for fields in nested for tensor in fields]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], nested: Any) -> Any:
    """Apply a function to every tensor in nested tuples and NamedTuples; keep other values."""
    if torch.is_tensor(nested):
        return function(nested)
    if not isinstance(nested, tuple):
        return nested
    parts = [map_tensors(function, part) for part in nested]
    return type(nested)(*parts) if hasattr(nested, "_fields") else tuple(parts)


def _matches(shape, pattern):
    """Return whether a shape has the sizes of a pattern, where −1 allows any size."""
    pairs = zip(shape, pattern)
    return len(shape) == len(pattern) and all(allowed in (size, -1) for size, allowed in pairs)


class FPRNNState(NamedTuple):
    """State after a forward pass; the next segment of the same streams continues from it."""

    layers: tuple[Any, ...]  # state of every layer; a BlockState for fixed-point blocks
    # (b,) id of each row's last token; −1 if the row has no token, or if the token was given as an
    # embedding and is not EOS. None: unknown
    last_token: torch.Tensor | None

    def check(self, batch: int, expected: list[list[tuple[int, ...]]]) -> None:
        """Check that a model can continue from this state.

        Args:
            batch: Number of streams.
            expected: Result of `state_shapes` of every layer of the model.

        Raises:
            ValueError: If the state is of another model or of another number of streams.
        """
        if len(self.layers) != len(expected):
            raise ValueError(
                f"the state is of a model with {len(self.layers)} layers, this one has"
                f" {len(expected)}"
            )
        for index, (layer, patterns) in enumerate(zip(self.layers, expected)):
            shapes = [tuple(t.shape[1:]) for t in list_tensors(layer)]  # without the batch
            if len(shapes) != len(patterns) or not all(map(_matches, shapes, patterns)):
                raise ValueError(
                    f"the state is of another model: layer {index} of the state has the shapes"
                    f" {shapes} per stream, and this model needs {patterns} (−1: any number)"
                )
            other_batches = {len(t) for t in list_tensors(layer)} - {batch}
            if other_batches:
                raise ValueError(
                    f"the state is of a batch of {other_batches.pop()} sequences, the input has"
                    f" {batch}"
                )

    @property
    def stream_indices(self) -> torch.Tensor:
        """Index of each stream, (b,), on the state's device."""
        first = next(t for layer in self.layers for t in list_tensors(layer))
        return torch.arange(len(first), device=first.device)

    def select(self, rows: torch.Tensor) -> "FPRNNState":
        """Return the state of these rows (k,) of the batch."""
        return map_tensors(lambda t: t[rows], self)


class FPRNNCache:
    """Cache of `generate`: the FPRNNState from which the next forward pass continues.

    Its size does not grow with the text, except for the state of attention layers.
    """

    state: Any  # FPRNNState | None
    is_compileable = False
    is_croppable = False  # a recurrence cannot go back
    is_linear = (False,)  # False: transformers 5.24 cuts the cached tokens off a prompt

    def __init__(self, state: FPRNNState | None = None, length: int = 0) -> None:
        self.state, self.length = state, length
        self._weight_caches: dict[int, WeightCache] = {}  # layer index → cache

    def weight_cache(self, layer: int) -> "WeightCache":
        """Return the WeightCache of a layer."""
        return self._weight_caches.setdefault(layer, WeightCache())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached weights: a copy may be used with other parameters."""
        return {**vars(self), "_weight_caches": {}}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read, padding included."""
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue from the state of row beam_idx[i] (beam search)."""
        self.state = self.state.select(beam_idx.to(self.state.stream_indices.device))

    def crop(self, max_length: int) -> None:
        raise ValueError(
            f"a recurrent cache cannot be cropped (to {max_length} tokens): it does not store"
            " earlier states. Read the shorter text again, with a new cache"
        )


class WeightCache:
    """Tensors that a block computes from its parameters only, such as joined weights.

    They stay valid from one pass to the next, until a parameter changes.
    """

    _versions: Any
    _views: Any
    _values: dict[Hashable, Any]

    def __init__(self) -> None:
        self._versions, self._views, self._values = None, (), {}

    def valid_for(self, parameters: list[torch.Tensor] | None) -> "WeightCache | None":
        """Return this cache, emptied if a parameter has changed; None if caching is not safe.

        Args:
            parameters: Parameters that the values depend on. None: the values also depend on
                something else.
        """
        if parameters is None or torch.is_grad_enabled():
            return None
        if any(t.is_inference() for t in parameters):  # inference tensors have no _version
            return None
        versions = [(t.data_ptr(), t._version, t.dtype) for t in parameters]
        if versions != self._versions:
            # Views keep the memory alive, so that no other tensor can get the same address.
            self._versions, self._views = versions, [t.detach() for t in parameters]
            self._values = {}
        return self

    def get_or_make(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of this name; `make` computes it the first time."""
        if name not in self._values:
            self._values[name] = make()
        return self._values[name]


def cached(cache: WeightCache | None, name: Hashable, make: Callable[[], Any]) -> Any:
    """Return a value from the cache, or `make()` if the cache is None or lacks it."""
    return make() if cache is None else cache.get_or_make(name, make)


def draw(
    sample: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    device: torch.device,
    generators: list[torch.Generator] | None,
) -> torch.Tensor:
    """Draw random numbers for a batch.

    Args:
        sample: torch.randn or torch.rand.
        shape: Shape of the result, (b,…).
        device: Device of the result and of the generators.
        generators: One generator per sequence, so that the numbers of a sequence do not depend on
            its batch. None: torch's own generator for the whole batch.
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
        block: A block whose `noise_width` n is above 0.
        u: Its input, (b,l,d_model).
        sigma: σ. Fixed-point blocks multiply the noise by the weights of their norm; LSTM and sLSTM
            add it to states between −1 and 1.
        generators: As in `draw`.

    Returns:
        Noise (b,l,n), or None for σ = 0.
    """
    if not sigma:
        return None
    noise = draw(torch.randn, (*u.shape[:2], block.noise_width), u.device, generators)
    return sigma * draw(torch.rand, (len(u), 1, 1), u.device, generators) * noise


class SolveOptions(NamedTuple):
    """Options of the solves in one pass of the model."""

    settings: Any = None  # configuration with the solver's fields; None: the block's own
    draw_noise: Callable[..., torch.Tensor | None] = draw_state_noise  # Adversary replaces it
    generators: list[torch.Generator] | None = None  # of the noise, one per sequence: see `draw`
    # Returns the context of a solve, such as a timer.
    solve_context: Callable[[], AbstractContextManager[Any]] = nullcontext


class Sequences(NamedTuple):
    """Properties of a batch's tokens besides their embeddings; None: does not apply."""

    mask: torch.Tensor | None = None  # (b,l) False at padding, which does not change states
    starts: torch.Tensor | None = None  # (b,l) True at the first token of a packed document
    # State before the first token. A block that reads or returns a state needs right padding.
    state: BlockState | None = None
    return_state: bool = False  # whether the block returns its BlockState
    noise: torch.Tensor | None = None  # (b,l,n) added to the state that is read (`state_noise`)
    cache: WeightCache | None = None  # cached weights of the block
    options: SolveOptions = SolveOptions()
    adjoint_norm: torch.Tensor | None = None  # (b,) that the backward fills, see FixedPointStats

    def get_state(self, name: str, index: int | None = None) -> Any:
        """Return a field of the state before the first token, or None without a state.

        Args:
            name: Name of the field.
            index: Position in the field, if it is a tuple.
        """
        value = None if self.state is None else getattr(self.state, name)
        return value if value is None or index is None else value[index]

    def with_noise(self, block: Any, u: torch.Tensor) -> "Sequences":
        """Return the sequences with new state noise of a block with the input u (b,l,d_model).

        The noise is None in evaluation.
        """
        if not block.training:
            return self
        options = self.options
        settings = block.config if options.settings is None else options.settings
        noise = options.draw_noise(block, u, settings.state_noise, options.generators)
        return self._replace(noise=noise)

    def cut(self, start: int, end: int, state: Any) -> "Sequences":
        """Return the properties of tokens start ≤ t < end, with the state before them."""
        mask, starts = (None if t is None else t[:, start:end] for t in (self.mask, self.starts))
        return Sequences(mask, starts, state, options=self.options)

    def zero_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (b,l,·) with zeros at padding."""
        return x if self.mask is None else x * self.mask.unsqueeze(-1)

    def zero_status(self, status: torch.Tensor) -> torch.Tensor:
        """Return the status of each token (b,l) with zeros at padding."""
        return status if self.mask is None else status * self.mask


def shift(y: torch.Tensor, seqs: Sequences, name: str = "y") -> torch.Tensor:
    """Return sh(y) (b,l,d): the y of the token before each token.

    It is zero at the first token of a packed document. At the first token of a row it is read from
    the state, and zero without a state.

    Args:
        y: Iterate, (b,l,d).
        seqs: Properties of the batch.
        name: Field of the BlockState: "y" or "f_y".
    """
    last_y = seqs.get_state(name)
    first = torch.zeros_like(y[:, :1]) if last_y is None else last_y.to(y.dtype).unsqueeze(1)
    y = torch.cat([first, y[:, :-1]], 1)
    return y if seqs.starts is None else y.masked_fill(seqs.starts.unsqueeze(-1), 0)


def gather_tokens(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return x (b,l,…) at the positions (b,k) of each row, (b,k,…)."""
    return x.take_along_dim(positions.reshape(*positions.shape, *[1] * (x.dim() - 2)), 1)


def last_valid_tokens(
    x: torch.Tensor, n: int, previous: torch.Tensor | None, seqs: Sequences
) -> torch.Tensor:
    """Return the last n tokens of each row that are not padding.

    Tokens outside the row's last document are zero.

    Args:
        x: Vectors of the tokens, (b,l,…), with padding on the right.
        n: Number of tokens.
        previous: Vectors of the n tokens before x, (b,n,…); zero if None.
        seqs: Padding and documents.

    Returns:
        (b,n,…), detached and copied, so that it does not keep the memory of x alive.
    """
    x = x.detach()
    if seqs.mask is None and seqs.starts is None and n <= x.shape[1]:
        return x[:, x.shape[1] - n :].clone()
    if previous is None:
        previous = x.new_zeros(x.shape[0], n, *x.shape[2:])
    joined = torch.cat([previous.to(x.dtype), x], 1)  # (b,n+l,…)
    if seqs.mask is None and seqs.starts is None:
        return joined[:, x.shape[1] :].clone()
    # Padding is on the right: positions 0 to n + token_count − 1 of `joined` are valid.
    token_count = x.shape[1] if seqs.mask is None else seqs.mask.sum(1, keepdim=True)
    positions = token_count + torch.arange(n, device=x.device).expand(x.shape[0], n)
    tail = gather_tokens(joined, positions)
    if seqs.starts is None or n == 0:
        return tail
    # `previous` belongs to the first token's document, unless this token starts a document.
    document = F.pad(seqs.starts.long().cumsum(1), (n, 0))
    document = gather_tokens(document, positions)
    is_last_document = document == document[:, -1:]
    return tail * is_last_document.reshape(*is_last_document.shape, *[1] * (tail.dim() - 2))


def order_padding_last(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of positions that puts padding last, and the inverse order.

    Args:
        mask: False at padding, (b,l).

    Returns:
        Two orders (b,l) for `gather_tokens`.
    """
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    return order, order.argsort(1)


class Adversary:
    """State noise along the gradient of the loss, in a second pass over the same tokens.

    In the second pass the noise of every block is the first pass's noise plus a vector along the
    first loss's gradient with respect to this noise:

        with adversary.first_pass():
            loss = ...
        loss.backward()
        with adversary.second_pass():
            adversarial_loss = ...
        adversarial_loss.backward()

    Source: Goodfellow et al. 2015, Eq. 1, applied to the state instead of the input, with the
    2-norm.
    """

    def __init__(self, model: Any, size: float) -> None:
        """Create an adversary.

        Args:
            model: Model in training mode, with layers whose `noise_width` is above 0.
            size: Largest length of a token's vector, in units of √noise_width. For fixed-point
                layers this is the length of the norm's output. Every sequence draws its own length
                from U[0, size].
        """
        self.model, self.size = model, size
        self.noise: dict[Any, torch.Tensor] = {}

    def first_pass(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the first pass, which records the noise of every block."""
        self.noise.clear()
        return self.model.override_solve_options(draw_noise=self._record_noise)

    def second_pass(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the second pass, after the backward of the first."""
        if all(noise.grad is None for noise in self.noise.values()):
            raise RuntimeError("the second pass needs the backward of the first")
        return self.model.override_solve_options(draw_noise=self._add_adversarial_noise)

    def _record_noise(self, block, u, sigma, generators):
        noise = draw_state_noise(block, u, sigma, generators)
        if noise is None:
            noise = torch.zeros(*u.shape[:2], block.noise_width, device=u.device)
        self.noise[block] = noise.requires_grad_()
        return noise

    def _add_adversarial_noise(self, block, u, sigma, generators):
        noise = self.noise[block]
        if noise.grad is None:  # no equation of the layer reads the noise
            return noise.detach()
        grad_norm = torch.linalg.vector_norm(noise.grad, dim=-1, keepdim=True)
        direction = noise.grad / grad_norm.clamp_min(torch.finfo(grad_norm.dtype).tiny)
        fraction = draw(torch.rand, (len(u), 1, 1), u.device, generators)
        return noise.detach() + self.size * math.sqrt(noise.shape[-1]) * fraction * direction
