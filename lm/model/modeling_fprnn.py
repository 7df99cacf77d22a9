"""The HuggingFace classes: backbone, language model with generation, sequence classifier.

This file and those that it imports are part of every exported checkpoint.

Shape suffixes: b batch, l length.
"""

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.modeling_utils import PreTrainedModel

from .baseline_layers import PlainLayer
from .batch import (
    CACHE,
    FixedPointReport,
    FPRNNCausalLMOutput,
    FPRNNOutput,
    check_arguments,
    choose_cache,
    choose_targets,
    chunked_nll_sum,
    count_targets,
    embed,
    find_document_starts,
    find_eos_ids,
    mark_after_eos,
    nll_sum,
    read_attention_mask,
    select_positions,
    to_fp32,
)
from .blocks import FPRNN
from .bundled_kernels import load_bundled_kernels
from .cell import find_root
from .certified_root import find_certified_roots
from .checksums import refuse_changed
from .configuration_fprnn import FPRNNConfig, refuse_solver_token
from .delta import GatedDeltaNet
from .diagonal import Mamba
from .fields import FIXED_POINT_KINDS, FP32_PARAMETERS, SOLVER
from .fixed_point import FixedPointBlock
from .full_rank import solve_by_iterating
from .layers import RMSNorm, is_on_cpu
from .mixer_base import Mixer
from .mixers import build_mixer, nrm
from .scan import selective_scan
from .solver import (
    FixedPointStats,
    NonFiniteError,
    all_finite,
    explain_nonfinite,
    read_flags,
    stack_flags,
)
from .stack import FPRNNLayer, initialize, initialize_once, register_model_types
from .state import (
    FPRNNCache,
    FPRNNState,
    Sequences,
    SolveOptions,
    gather_tokens,
    last_valid_tokens,
    order_padding_last,
)
from .strategies import choose_solver

# transformers copies only files that the modeling file itself imports from. These imports make the
# list of files complete.
_EXPORTED = (
    FPRNN,
    GatedDeltaNet,
    Mamba,
    Mixer,
    build_mixer,
    load_bundled_kernels,
    choose_solver,
    find_certified_roots,
    find_root,
    nrm,
    selective_scan,
    solve_by_iterating,
)

LOSS_CHUNK_TOKENS = 4096  # tokens whose logits exist at once if only the loss is computed


class Tokens(NamedTuple):
    """A batch of tokens. Fields that are unknown, or do not apply, are None."""

    hidden: torch.Tensor  # (b,l,d_model) embedded
    input_ids: torch.Tensor | None  # (b,l)
    mask: torch.Tensor | None  # (b,l) bool, False at padding
    starts: torch.Tensor | None  # (b,l) bool, True at the first token of a packed document
    original_order: torch.Tensor | None = None  # (b,l) positions that undo move_padding_right

    def move_padding_right(self) -> "Tokens":
        """Return the same tokens with padding on the right.

        The solve starts from a row's state at its first position, which must be a token.
        """
        if self.mask is None:
            return self
        order, original_order = order_padding_last(self.mask)
        input_ids, mask, starts = (
            None if t is None else gather_tokens(t, order)
            for t in (self.input_ids, self.mask, self.starts)
        )
        return Tokens(gather_tokens(self.hidden, order), input_ids, mask, starts, original_order)

    def restore_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Return vectors x of these tokens (b,l,·) with the padding in its original place."""
        return x if self.original_order is None else gather_tokens(x, self.original_order)


class LayerOutputs(NamedTuple):
    """Results of all layers for a batch."""

    # (b,l,d_model) each: input of every layer, if asked for, then the final norm's output
    hidden_states: list[torch.Tensor]
    stats: list[FixedPointStats]  # of each fixed-point layer
    states: list[Any]  # state of each layer after the last token; empty without `return_state`
    is_finite: list[torch.Tensor]  # (,) bool: embeddings, each layer's output, final norm's output


class FPRNNPreTrainedModel(PreTrainedModel):
    """Initialization and loading shared by the model classes."""

    config_class = FPRNNConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FPRNNLayer"]  # noqa: RUF012
    _is_stateful = True

    def __init__(self, config: FPRNNConfig) -> None:
        config.settle()
        super().__init__(config)
        names = (
            name for layer in config.layer_list() for name in FP32_PARAMETERS.get(layer.kind, ())
        )
        self._keep_in_fp32_modules_strict = list(dict.fromkeys(names))  # without duplicates

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as transformers does, after checking its checksums.

        Raises:
            ValueError: If the folder's weights or config.json do not match its SHA256SUMS.
        """
        path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        if path is not None and os.path.isdir(path):
            folder = os.path.join(path, kwargs.get("subfolder", ""))
            refuse_changed(folder, lambda name: name == "config.json" or ".safetensors" in name)
        refuse_solver_token(kwargs)
        return super().from_pretrained(*args, **kwargs)

    def fixed_point_blocks(self) -> list[FixedPointBlock]:
        """Return the blocks of all fixed-point layers, from the first to the last."""
        return [module for module in self.modules() if isinstance(module, FixedPointBlock)]

    @contextlib.contextmanager
    def solving(self, **fields: Any) -> Iterator["FPRNNPreTrainedModel"]:
        """Solve with other solver settings inside a `with` block; blocks nest.

        `config` does not change. If `token` changes, schedule, stopping and gradient get the
        defaults of the new token, unless they are in `fields`.

        Args:
            fields: Solver fields of FPRNNConfig.

        Raises:
            TypeError: If a name is not a solver field.
            ValueError: If a field cannot have the value, or if the model has no fixed-point layer.
        """
        for name in fields:
            if name not in SOLVER:
                raise TypeError(f"{name} is not a solver field: these are {', '.join(SOLVER)}")
        if not self.fixed_point_blocks():
            raise ValueError(f"`{self.config.layers}` has no fixed-point layer, so no solver")
        settings = copy.copy(self._settings())
        if fields.get("token", settings.token) != settings.token:
            settings.schedule = settings.stopping = settings.gradient = "auto"
        for name, value in fields.items():
            setattr(settings, name, value)
        settings.settle()
        with self.override_solve_options(settings=settings):
            yield self

    @contextlib.contextmanager
    def override_solve_options(self, **fields: Any) -> Iterator[None]:
        """Change fields of state.SolveOptions inside a `with` block; blocks nest."""
        backbone = self.base_model
        options = backbone.solve_options
        backbone.solve_options = options._replace(**fields)
        try:
            yield
        finally:
            backbone.solve_options = options

    def _settings(self):
        """Return the configuration whose solver fields apply now."""
        settings = self.base_model.solve_options.settings
        return self.config if settings is None else settings

    @torch.no_grad()
    def _init_weights(self, module):
        initialize(module, self.config)

    def _initialize_weights(self, module, *args, **kwargs):
        initialize_once(self, module)
        super()._initialize_weights(module, *args, **kwargs)


class FPRNNModel(FPRNNPreTrainedModel):
    """Embedding, n_layer layers on an fp32 residual stream, final norm."""

    def __init__(self, config: FPRNNConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(FPRNNLayer(config, layer) for layer in config.layer_list())
        self.solve_options = SolveOptions(config)
        self.norm_f = RMSNorm(config.d_model, config.norm_epsilon)
        self.fixed_point_indices = None  # of the fixed-point layers; None: all layers
        if config.layers is not None:
            kinds = [layer.kind for layer in self.layers]
            self.fixed_point_indices = [
                i for i, kind in enumerate(kinds) if kind in FIXED_POINT_KINDS
            ]
        self.post_init()

    def __getstate__(self) -> dict[str, Any]:
        """Reset the solve options: a copy of the model would keep overridden options forever."""
        return {**vars(self), "solve_options": SolveOptions(self.config)}

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value

    def _make_sequences(self, tokens, state, return_state):
        """Collect the properties of a batch's tokens: padding, and starts of documents.

        Args:
            tokens: The Tokens. Of embedded tokens only the ids of EOS tokens are known, and the
                others are −1.
            state: FPRNNState before the first tokens, or None.
            return_state: Whether the layers return their state.

        Returns:
            Sequences. Its `starts` are None if no document starts, which computes less. A pass on a
            GPU that returns no state does not check this, because the host would wait, and nearly
            every training batch of text has an EOS token.
        """
        cfg, mask, starts = self.config, tokens.mask, tokens.starts
        if tokens.input_ids is not None and cfg.reset_at_eos and cfg.eos_token_id is not None:
            last_token = None if state is None else state.last_token
            follows_eos = mark_after_eos(tokens.input_ids, cfg.eos_token_id, last_token)
            starts = follows_eos if starts is None else starts | follows_eos
        if starts is not None and mask is not None:
            starts = starts & mask  # padding may be EOS tokens; it must not change the state
        can_read_starts = starts is not None and (return_state or is_on_cpu(starts))
        if can_read_starts and not starts.any():
            starts = None
        return Sequences(mask, starts, return_state=return_state, options=self.solve_options)

    @torch.compiler.disable  # the length of a solve depends on the data
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        state: FPRNNState | None = None,
        return_state: bool = False,
        past_key_values: FPRNNCache | None = None,
        use_cache: bool | None = None,
        position_ids: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        count_iterations: bool = False,
        cache: FPRNNCache | None = None,
        defer_check: bool = False,
        **kwargs: Any,
    ) -> FPRNNOutput | tuple[Any, ...]:
        """Apply the model.

        Args:
            input_ids: Token ids, (b,l).
            attention_mask: 0 at padding, (b,l); padding may be on either side.
            inputs_embeds: Embedded tokens, (b,l,d_model), instead of input_ids.
            output_hidden_states: Whether to return the input of each layer. None: as in the config.
            return_dict: Whether to return an FPRNNOutput; False: a tuple. None: as in the config.
            state: FPRNNState that an earlier pass returned; the rows continue from it.
            return_state: Whether to return the FPRNNState after each row's last token. It is
                detached, so a stream that is processed in segments is trained by truncated
                backpropagation.
            past_key_values: FPRNNCache of `generate`, to start from and to update. attention_mask
                may then cover all tokens of the cache as well.
            use_cache: Whether to return a new cache. None: as in the config, except in training or
                if a state is given or returned.
            position_ids: Positions, (b,l) or (1,l). A document starts at every position that is not
                above the previous position, and at the start of a row whose first position is 0.
                With a cache the first token continues its document.
            seq_idx: Index of each token's document, (b,l) or (1,l), instead of position_ids.
            count_iterations: Whether to measure ℓ*, the iterations of the paper's procedure
                (solver.measure_num_iters).
            cache: Another name of past_key_values.
            defer_check: Whether to return without waiting for the device to check that the pass is
                finite. The caller then passes FPRNNOutput.is_finite to `refuse_nonfinite`. A pass
                that updates a cache is always checked, and has no is_finite.
            kwargs: See batch.check_arguments.

        Raises:
            ValueError: If input_ids and inputs_embeds are both given or both missing, if there are
                no tokens, if an id is outside the vocabulary, if a mask or positions have another
                shape, if a state or cache is of another batch or model, or if both are given.
            TypeError: If a keyword argument is unknown.
            NonFiniteError: If a number became NaN or infinite. It names the layer, cause and cure.
        """
        if torch.compiler.is_exporting():
            raise NotImplementedError(
                "torch.export does not support a solve, because its length depends on the data"
            )
        cfg = self.config
        has_documents = position_ids is not None or seq_idx is not None
        check_arguments(type(self).__name__, kwargs, has_documents)
        if output_hidden_states is None:
            output_hidden_states = cfg.output_hidden_states
        if use_cache is None:
            use_cache = cfg.use_cache and not (self.training or return_state or state is not None)

        # 1. Embed, and find the state that the rows continue from.
        hidden = embed(self.embeddings, input_ids, inputs_embeds)  # (b,l,d_model)
        batch, length = hidden.shape[:2]
        cache = choose_cache(past_key_values, cache)
        if cache is None and use_cache:
            cache = FPRNNCache()
        state = self._choose_initial_state(batch, state, cache)
        needs_state = return_state or cache is not None

        # 2. Find padding and documents, (b,l) each.
        mask = read_attention_mask(attention_mask, batch, length, has_cache=cache is not None)
        starts = find_document_starts(position_ids, seq_idx, batch, length)
        tokens = Tokens(hidden, input_ids, mask, starts).move_padding_right()
        if tokens.starts is not None:
            # Without a state there is no earlier document that the first token could end. With a
            # cache the first token continues the document of the cache.
            can_first_token_start = state is not None and cache is None
            tokens.starts[:, 0] &= can_first_token_start
        tokens = self._find_eos_ids(tokens)
        seqs = self._make_sequences(tokens, state, needs_state)

        # 3. Apply the layers.
        outputs = self._apply_layers(
            tokens.hidden, seqs, state, cache, output_hidden_states, count_iterations
        )
        is_checked = not defer_check or cache is not None
        if is_checked:
            self.refuse_nonfinite(read_flags(outputs.is_finite))

        # 4. Collect the results, with padding in its original place.
        hidden_states = [tokens.restore_padding(hidden) for hidden in outputs.hidden_states]
        last_hidden = hidden_states[-1]
        end_state = None
        if needs_state:
            end_state = self._make_end_state(tokens.input_ids, seqs, state, outputs.states)
        if cache is not None:
            cache.state = end_state
            cache.length += length
        output = FPRNNOutput(
            last_hidden_state=last_hidden,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            fixed_point=self._make_report(outputs.stats, tokens, last_hidden.device),
            state=end_state if return_state else None,
            **{CACHE: cache},
            is_finite=None if is_checked else stack_flags(outputs.is_finite),
        )
        return output if _returns_dict(return_dict, cfg) else output.to_tuple()

    def _choose_initial_state(self, batch, state, cache):
        """Return the state before the first tokens: `state`, or the state in the cache, or None.

        Raises:
            ValueError: If state and cache are both given, or if the state is of another model or
                batch.
        """
        if cache is not None:
            if state is not None:
                raise ValueError("give one of state and past_key_values")
            if not isinstance(cache, FPRNNCache):
                raise ValueError(f"past_key_values is a {type(cache).__name__}, not an FPRNNCache")
            state = cache.state
        if state is None:
            return None
        state.check(batch, [layer.block.state_shapes() for layer in self.layers])
        return state

    def _find_eos_ids(self, tokens):
        """Return the Tokens with the ids of embedded EOS tokens, if a document starts after EOS."""
        cfg = self.config
        if tokens.input_ids is not None or not cfg.reset_at_eos or cfg.eos_token_id is None:
            return tokens
        return tokens._replace(
            input_ids=find_eos_ids(tokens.hidden, self.embeddings, cfg.eos_token_id)
        )

    def _apply_layers(self, hidden, seqs, state, cache, output_hidden_states, count_iterations):
        """Apply the layers and the final norm to the embedded tokens hidden (b,l,d_model)."""
        residual = None
        hidden_states, stats, states = [], [], []
        is_finite = [all_finite(hidden)]  # read later, because each reading waits for the device
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                # Return the very tensor that the layer reads: only this tensor gets a gradient.
                hidden = hidden if residual is None else residual + hidden
                residual = None
                hidden_states.append(hidden)
            if state is not None:
                seqs = seqs._replace(state=state.layers[index])
            if cache is not None:
                seqs = seqs._replace(cache=cache.weight_cache(index))
            try:
                hidden, residual, layer_stats, *layer_state = layer(
                    hidden, residual, seqs, count_iterations
                )
            except NonFiniteError as error:
                # Name this layer, or an earlier place whose output is not finite already.
                self.refuse_nonfinite([*read_flags(is_finite), False], str(error))
            is_finite.append(all_finite(hidden))
            if layer_stats is not None:
                stats.append(layer_stats)
            states += layer_state
        hidden = self.norm_f(residual + hidden)
        is_finite.append(all_finite(hidden))
        return LayerOutputs([*hidden_states, hidden], stats, states, is_finite)

    def _make_report(self, stats, tokens, device):
        """Stack the layers' statistics, with padding in its original place.

        Args:
            stats: FixedPointStats of each fixed-point layer.
            tokens: The Tokens.
            device: Device of the report, because layers may be on several.

        Returns:
            FixedPointReport, or None without a fixed-point layer.
        """
        if not stats:
            return None
        # One tuple per field of FixedPointStats, with the values of all layers.
        *stacked_fields, adjoint_norms = zip(*stats)
        fields = [
            None if values[0] is None else torch.stack([value.to(device) for value in values])
            for values in stacked_fields
        ]
        # Not stacked: the backward writes into the layers' own tensors.
        fields.append(None if adjoint_norms[0] is None else list(adjoint_norms))
        report = FixedPointReport(fields, self.fixed_point_indices)
        order = tokens.original_order
        if order is not None and report.token_iters is not None:
            report.token_iters = report.token_iters.take_along_dim(order.unsqueeze(0), 2)
        return report

    def _list_places(self):
        """Return (name, module) of all places whose output is checked, in the order of flags."""
        layers = [(f"layer {index}", layer) for index, layer in enumerate(self.layers)]
        embedded = ("the embedded input", self.embeddings)
        return [embedded, *layers, ("the final norm", self.norm_f)]

    def refuse_nonfinite(
        self,
        is_finite: torch.Tensor | list[bool] | None,
        symptom: str = "its output is NaN or infinite",
    ) -> None:
        """Raise an error that names the first place that is not finite, if there is one.

        Args:
            is_finite: FPRNNOutput.is_finite, or its values. None: the pass has been checked.
            symptom: Description of the output of that place.

        Raises:
            NonFiniteError: If a flag is False.
        """
        if isinstance(is_finite, torch.Tensor):
            is_finite = is_finite.tolist()
        if is_finite is not None and not all(is_finite):
            place, module = self._list_places()[is_finite.index(False)]
            raise explain_nonfinite(place, module, self.config, symptom) from None

    def _make_end_state(self, input_ids, seqs, state, layer_states):
        """Return the FPRNNState after the last token."""
        if input_ids is None:
            return FPRNNState(tuple(layer_states), last_token=None)
        previous = None if state is None else state.last_token
        if previous is None:
            previous = input_ids.new_full(input_ids.shape[:1], -1)
        last = last_valid_tokens(input_ids.unsqueeze(-1), 1, previous[:, None, None], seqs)
        return FPRNNState(tuple(layer_states), last.flatten())


class FPRNNForCausalLM(FPRNNPreTrainedModel, GenerationMixin):
    """FPRNNModel with a language-model head, tied to the embedding or not."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: FPRNNConfig) -> None:
        super().__init__(config)
        self.backbone = FPRNNModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
        register_model_types(self)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """Prepare as GenerationMixin does, and add an empty cache if the prompt is read in chunks.

        Without chunks the first forward pass creates the cache. `generate` splits a prompt only if
        there already is a cache.
        """
        is_chunked = generation_config.prefill_chunk_size is not None
        has_cache = any(model_kwargs.get(name) is not None for name in ("past_key_values", "cache"))
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if is_chunked and not has_cache and generation_config.use_cache is not False:
            model_kwargs[CACHE] = FPRNNCache()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        loss_only: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        state: FPRNNState | None = None,
        return_state: bool = False,
        past_key_values: FPRNNCache | None = None,
        use_cache: bool | None = None,
        position_ids: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        count_iterations: bool = False,
        cache: FPRNNCache | None = None,
        **kwargs: Any,
    ) -> FPRNNCausalLMOutput | tuple[Any, ...]:
        """Compute next-token logits and, with labels, the mean cross-entropy.

        Args:
            input_ids, attention_mask, inputs_embeds, output_hidden_states, return_dict, state,
                return_state, past_key_values, use_cache, position_ids, seq_idx, count_iterations,
                cache: See FPRNNModel.forward, which also lists the errors.
            labels: The input's own tokens, (b,l); they are shifted inside, as everywhere in
                transformers. −100 is no target. The last target of a segment is the first token of
                the next one, so segments need shift_labels instead.
            logits_to_keep: Number of last positions whose logits are computed (0: all), or a tensor
                as in batch.select_positions. The loss is then over these positions only.
            loss_only: Whether to compute the loss without logits, LOSS_CHUNK_TOKENS at a time.
            kwargs: `shift_labels`, (b,l), are labels that are already shifted: shift_labels[t] is
                the token after input_ids[t]. If given, labels are not used. `num_items_in_batch` is
                the number of targets in all micro-batches of an update: the loss is then the sum
                over this micro-batch divided by it. They are not named arguments, because the
                Trainer of transformers would then require both kinds of labels.
        """
        # 1. Find the target of each token, (b,l).
        targets = choose_targets(labels, kwargs.pop("shift_labels", None))
        target_count = kwargs.get("num_items_in_batch")
        self._check_targets(targets, loss_only, logits_to_keep)
        if loss_only and use_cache is None:
            use_cache = False  # no later pass continues from a pass that computes a loss

        # 2. Apply the backbone: (b,l,d_model).
        outputs = self.backbone(
            input_ids,
            attention_mask,
            inputs_embeds,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            state=state,
            return_state=return_state,
            past_key_values=choose_cache(past_key_values, cache),
            use_cache=use_cache,
            position_ids=position_ids,
            seq_idx=seq_idx,
            count_iterations=count_iterations,
            defer_check=True,
            **kwargs,
        )

        # 3. Apply the head: logits (b,·,vocab_size), and the loss.
        hidden = outputs.last_hidden_state
        if loss_only:
            nll = chunked_nll_sum(self.lm_head, hidden, targets, LOSS_CHUNK_TOKENS)
            logits, loss = None, nll / count_targets(targets, target_count)
        else:
            logits, loss = self._compute_logits(hidden, targets, logits_to_keep, target_count)
        self._check_finite(outputs.is_finite, logits, loss)
        output = FPRNNCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            fixed_point=outputs.fixed_point,
            state=outputs.state,
            **{CACHE: getattr(outputs, CACHE)},
        )
        return output if _returns_dict(return_dict, self.config) else output.to_tuple()

    def _compute_logits(self, hidden, targets, logits_to_keep, target_count):
        """Return the logits (b,·,vocab_size) and, given targets, the loss over these positions."""
        logits = to_fp32(self.lm_head(select_positions(hidden, logits_to_keep)))
        if targets is None:
            return logits, None
        targets = select_positions(targets, logits_to_keep)
        return logits, nll_sum(logits, targets) / count_targets(targets, target_count)

    def _check_finite(self, backbone_flags, logits, loss):
        """Read the flags of the whole pass at once, and raise an error if one is False.

        Args:
            backbone_flags: FPRNNOutput.is_finite; None if the backbone has checked itself.
            logits, loss: Results of the head, or None.

        Raises:
            NonFiniteError: If a flag is False; the error names the first such place.
        """
        head_flags = [all_finite(t) for t in (logits, loss) if t is not None]
        backbone_flags = [] if backbone_flags is None else list(backbone_flags)
        flags = read_flags([*backbone_flags, *head_flags])
        self.backbone.refuse_nonfinite(flags[: len(backbone_flags)])
        if not all(flags):
            symptom = "finite hidden states gave a logit or a loss that is NaN or infinite"
            raise explain_nonfinite("the head", self.lm_head, self.config, symptom)

    def _check_targets(self, targets, loss_only, logits_to_keep):
        """Raise a ValueError if `loss_only` cannot compute the loss that is asked for."""
        if targets is None and loss_only:
            raise ValueError("loss_only needs labels or shift_labels")
        if loss_only and (torch.is_tensor(logits_to_keep) or logits_to_keep):
            raise ValueError("loss_only uses all tokens: logits_to_keep must be 0 with it")

    def solver(self, length: int | None = None) -> dict[str, Any] | str:
        """Return the solver's settings in the current mode (training or evaluation).

        Args:
            length: Tokens per sequence. None: unknown.

        Returns:
            See strategies.Solver.describe; "none" without fixed-point layers.
        """
        blocks = self.fixed_point_blocks()
        return blocks[0].describe_solver(self._settings(), length) if blocks else "none"

    def flops_per_token(
        self, evaluations: float, training: bool = True, length: int | None = None
    ) -> float:
        """Count FLOPs per token; a multiply-add counts as two.

        Training costs the forward of the solve, and three times the forward of `prepare`, of a
        single evaluation (`n_backwards` with one_step), of `gate_and_project` and of the head. If
        the gradient goes through a solve token by token, this evaluation is part of the solve.
        The iterations of an adjoint in windows are not counted, because they are only known
        afterwards. The number is affine in `evaluations`.

        Args:
            evaluations: Evaluations per token in every fixed-point layer.
            training: Whether to count the backward.
            length: Tokens per sequence, which the scores of attention depend on. None: the longest.
        """
        length = length or self.config.max_position_embeddings
        blocks = self.fixed_point_blocks()
        block_flops = [block.flops_per_token() for block in blocks]
        per_pass = sum(flops.per_solve for flops in block_flops)
        per_step = sum(flops.per_step for flops in block_flops)
        baselines = [m for m in self.modules() if isinstance(m, PlainLayer)]
        per_pass += sum(layer.flops_per_token(length) for layer in baselines)
        head = 2 * self.lm_head.weight.numel()
        factor = 3 if training else 1  # the backward costs two forwards
        if not blocks:
            return factor * (per_pass + head)
        settings = self._settings()
        steps = settings.n_backwards if settings.gradient == "one_step" else 1
        differentiated = per_pass + steps * per_step + head
        schedule = blocks[0].describe_solver(settings)["schedule"]
        if settings.gradient == "exact" and schedule == "sequential":
            evaluations = evaluations - 1  # `differentiated` has one of them
        return evaluations * per_step + factor * differentiated


class FPRNNForSequenceClassification(FPRNNPreTrainedModel):
    """FPRNNModel with a linear head on each row's last token, which has read the whole row."""

    # Loading a language model's checkpoint ignores its head without a warning.
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012
    # The loss is a mean over rows, which the Trainer divides by the number of accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: FPRNNConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.backbone = FPRNNModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()
        register_model_types(self)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Score every row by its last token that is not padding.

        Args:
            input_ids, attention_mask, inputs_embeds, output_hidden_states, return_dict, kwargs: See
                FPRNNModel.forward. Without a mask, tokens with config.pad_token_id are padding.
            labels: (b,) classes; (b,) numbers for one label; (b,num_labels) 0 or 1 for
                config.problem_type "multi_label_classification".
            use_cache: Has no effect; no cache is returned.

        Returns:
            logits (b,num_labels) in fp32, hidden_states if asked for, and the loss with labels.

        Raises:
            ValueError: If there are several rows, but no mask and no pad_token_id; or as
                FPRNNModel.forward.
        """
        outputs = self.backbone(
            input_ids,
            attention_mask,
            inputs_embeds,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            use_cache=False,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        positions = self._find_last_tokens(hidden, input_ids, attention_mask)
        rows = torch.arange(len(hidden), device=hidden.device)
        logits = to_fp32(self.score(hidden[rows, positions]))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config
            )
        output = SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states
        )
        return output if _returns_dict(return_dict, self.config) else output.to_tuple()

    def _find_last_tokens(self, hidden, input_ids, attention_mask):
        """Return the position of every row's last token that is not padding, (b,)."""
        batch, length = hidden.shape[:2]
        if attention_mask is not None:
            is_token = attention_mask != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            is_token = input_ids != self.config.pad_token_id
        elif batch == 1:
            is_token = torch.ones(1, length, dtype=torch.bool)
        else:
            raise ValueError(
                f"a batch of {batch} rows needs an attention_mask, 0 at padding: the last tokens"
                " are unknown without it, or input_ids and config.pad_token_id"
            )
        positions = torch.arange(length, device=hidden.device)
        return (positions * is_token.to(hidden.device)).argmax(1)


def _returns_dict(return_dict, config):
    """Return whether the output is a ModelOutput, not a tuple."""
    return config.return_dict if return_dict is None else return_dict


__all__ = [
    "FPRNNForCausalLM",
    "FPRNNForSequenceClassification",
    "FPRNNModel",
    "FPRNNPreTrainedModel",
]
