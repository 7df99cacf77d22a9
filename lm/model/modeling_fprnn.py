"""The HuggingFace classes: backbone, language model with generation, sequence classifier.

Shapes: b batch, l length. This file and those it imports travel with an exported checkpoint.
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
    after_end,
    checked_mask,
    chunked_nll_sum,
    document_starts,
    embed,
    ends_among,
    in_fp32,
    kept,
    nll_sum,
    number_of,
    one_cache,
    refuse_unknown,
    targets_of,
)
from .blocks import FPRNN
from .bundled_kernels import load_bundled_kernels
from .cell import find_root
from .certified_root import find_certified_roots
from .checksums import refuse_changed
from .configuration_fprnn import FPRNNConfig, refuse_solver_token
from .delta import GatedDeltaNet
from .diagonal import Mamba
from .fields import FIXED_POINT, IN_FP32, SOLVER
from .fixed_point import FixedPointBlock
from .full_rank import solve_by_iterating
from .layers import RMSNorm, on_cpu
from .mixer_base import Mixer
from .mixers import build_mixer, nrm
from .scan import selective_scan
from .solver import NonFiniteError, all_finite, explained, read_flags, stack_flags
from .stack import FPRNNLayer, initialise, initialise_once, let_be_known
from .state import (
    FPRNNCache,
    FPRNNState,
    Sequences,
    Solving,
    last,
    padding_to_the_right,
    taken,
)

# transformers copies only files that the modeling file itself names; these keep the list whole.
_TRAVELS = (
    FPRNN,
    GatedDeltaNet,
    Mamba,
    Mixer,
    build_mixer,
    load_bundled_kernels,
    find_certified_roots,
    find_root,
    nrm,
    selective_scan,
    solve_by_iterating,
)

LOSS_CHUNK_TOKENS = 4096  # tokens whose logits exist at once when only the loss is wanted


class Tokens(NamedTuple):
    """A batch of tokens; None: what is not known of them, or what there is none of."""

    hidden: torch.Tensor  # (b,l,d_model) embedded
    input_ids: torch.Tensor | None  # (b,l)
    mask: torch.Tensor | None  # (b,l) bool, False at padding
    starts: torch.Tensor | None  # (b,l) bool, True at the first token of a packed document
    back: torch.Tensor | None = None  # (b,l) the order that undoes a move of the padding

    def with_padding_on_the_right(self) -> "Tokens":
        """The same tokens, with padding behind the others: nothing may stand between a row's state,
        or the first window, and its first token."""
        if self.mask is None:
            return self
        order, back = padding_to_the_right(self.mask)
        input_ids, mask, starts = (
            None if of_tokens is None else taken(of_tokens, order)
            for of_tokens in (self.input_ids, self.mask, self.starts)
        )
        return Tokens(taken(self.hidden, order), input_ids, mask, starts, back)

    def put_back(self, x: torch.Tensor) -> torch.Tensor:
        """What the layers made of the tokens, (b,l,·), with the padding in its place again."""
        return x if self.back is None else taken(x, self.back)


class Passed(NamedTuple):
    """What the layers made of a batch."""

    states: list  # (b,l,d_model): where asked for, what each layer read; last what the norm gave
    stats: list  # FixedPointStats of each fixed-point layer
    ends: list  # where asked for, the state that each layer ended in
    is_finite: list  # (,) bool each, on the device: embeddings, each layer's output, final norm


class FPRNNPreTrainedModel(PreTrainedModel):
    """Initialisation and loading shared by the model classes."""

    config_class = FPRNNConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FPRNNLayer"]  # noqa: RUF012
    _is_stateful = True

    def __init__(self, config: FPRNNConfig) -> None:
        config.settle()
        super().__init__(config)
        kinds = dict.fromkeys(layer.kind for layer in config.layer_list())
        kept = (name for kind in kinds for name in IN_FP32.get(kind, ()))
        self._keep_in_fp32_modules_strict = list(dict.fromkeys(kept))

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """PreTrainedModel.from_pretrained, of files that are what they were.

        Raises:
            ValueError: the folder's weights or config.json are not what its SHA256SUMS says.
        """
        place = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        if place is not None and os.path.isdir(place):
            folder = os.path.join(place, kwargs.get("subfolder", ""))
            refuse_changed(folder, lambda name: name == "config.json" or ".safetensors" in name)
        refuse_solver_token(kwargs)
        return super().from_pretrained(*args, **kwargs)

    def fixed_point_blocks(self) -> list[FixedPointBlock]:
        return [module for module in self.modules() if isinstance(module, FixedPointBlock)]

    @contextlib.contextmanager
    def solving(self, **fields: Any) -> Iterator["FPRNNPreTrainedModel"]:
        """Inside, the layers solve with these solver fields (FPRNNConfig) instead of the config's;
        another `token` comes with its own defaults. `config` stays as it is; contexts nest.

        Raises:
            TypeError: not a solver field. ValueError: a value that it cannot have, or a model
                without fixed-point layers.
        """
        for name in fields:
            if name not in SOLVER:
                raise TypeError(f"{name} is no solver field: these are {', '.join(SOLVER)}")
        if not self.fixed_point_blocks():
            raise ValueError(f"no layer of `{self.config.layers}` is solved: there is no solver")
        settings = copy.copy(self._settings())
        if fields.get("token", settings.token) != settings.token:
            settings.schedule = settings.stopping = settings.gradient = "auto"
        for name, value in fields.items():
            setattr(settings, name, value)
        settings.settle()
        with self.passes(settings=settings):
            yield self

    @contextlib.contextmanager
    def passes(self, **fields: Any) -> Iterator[None]:
        """Inside, a pass of the model has these fields of state.Solving; contexts nest."""
        backbone = self.base_model
        before = backbone.how
        backbone.how = before._replace(**fields)
        try:
            yield
        finally:
            backbone.how = before

    def _settings(self):
        """The config whose solver fields hold."""
        settings = self.base_model.how.settings
        return self.config if settings is None else settings

    @torch.no_grad()
    def _init_weights(self, module):
        initialise(module, self.config)

    def _initialize_weights(self, module, *args, **kwargs):
        initialise_once(self, module)
        super()._initialize_weights(module, *args, **kwargs)


class FPRNNModel(FPRNNPreTrainedModel):
    """Embedding, n_layer fixed-point blocks on an fp32 residual stream, final norm."""

    def __init__(self, config: FPRNNConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(FPRNNLayer(config, layer) for layer in config.layer_list())
        self.how = Solving(config)
        self.norm_f = RMSNorm(config.d_model, config.norm_epsilon)
        # The numbers of the fixed-point layers, from 0 on; None where all are.
        self.solved_layers = None
        if config.layers is not None:
            kinds = [layer.kind for layer in self.layers]
            self.solved_layers = [i for i, kind in enumerate(kinds) if kind in FIXED_POINT]
        self.post_init()

    def __getstate__(self) -> dict[str, Any]:
        """A copy made inside `passes` would never leave it."""
        return {**vars(self), "how": Solving(self.config)}

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value

    def _sequences(self, input_ids, mask=None, starts=None, state=None, return_state=False):
        """Collect the properties of a batch's tokens: padding, and starts of documents.

        Args:
            input_ids: Tokens, shape (batch, length); None if unknown. Of embedded tokens only the
                ids of EOS tokens are known, and the others are −1.
            mask: False at padding, shape (batch, length), or None.
            starts: True where a document starts, besides after EOS tokens; same shape, or None.
            state: FPRNNState before the first tokens, or None.
            return_state: Whether the layers return their state.

        Returns:
            Sequences, where None stands for nothing special. `starts` without a start become None,
            which computes less. A pass on a GPU that returns no state does not look for one,
            because the host would wait, and nearly every training batch of text has an EOS token.
        """
        cfg = self.config
        if input_ids is not None and cfg.reset_at_eos and cfg.eos_token_id is not None:
            after = after_end(input_ids, cfg.eos_token_id, state and state.last_token)
            starts = after if starts is None else starts | after
        if starts is not None and mask is not None:
            starts = starts & mask  # padding may be EOS tokens; it must leave the state as it is
        is_read = starts is not None and (return_state or on_cpu(starts))
        if is_read and not starts.any():
            starts = None
        return Sequences(mask, starts, return_state=return_state, solving=self.how)

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
        """input_ids (b,l), or inputs_embeds (b,l,d_model); attention_mask (b,l), 0 at padding on
        either side → FPRNNOutput.

        Args:
            output_hidden_states, return_dict: None as the config says.
            state: the FPRNNState that an earlier pass returned: the rows go on from there.
            return_state: return the FPRNNState after each row's last token. It has no gradient, so
                a stream processed in segments is trained by truncated backpropagation.
            past_key_values or cache, use_cache: the same for `generate`: an FPRNNCache to start
                from and to update, or a new one. attention_mask may then be of all tokens so far.
                use_cache None: as the config says, except in training or where a state is asked
                for.
            position_ids: (b,l) or (1,l). A document starts where they do not go up, and at the
                start of a row where the first is 0; with a cache the first token goes on.
            seq_idx: (b,l) or (1,l), the number of each token's document: the same said otherwise.
            count_iterations: measure ℓ*, what the paper's procedure would need, as well.
            defer_check: Do not wait for the device to check that the pass is finite. The caller
                reads FPRNNOutput.is_finite instead and gives it to `refuse_nonfinite`. A pass that
                updates a cache is checked all the same, and has no is_finite.
            kwargs: see inputs.refuse_unknown.
        Raises:
            ValueError: both or neither of input_ids and inputs_embeds, no tokens, ids outside the
                vocabulary, a mask or positions of another shape, another batch's or model's state
                or cache, or both a state and a cache.
            TypeError: an unknown keyword argument.
            NonFiniteError: something became NaN or infinite; names the layer, cause and cure.
        """
        if torch.compiler.is_exporting():
            raise NotImplementedError("torch.export cannot take a solve: its length is the data's")
        cfg = self.config
        refuse_unknown(type(self).__name__, kwargs, not (position_ids is None and seq_idx is None))
        if output_hidden_states is None:
            output_hidden_states = cfg.output_hidden_states
        if use_cache is None:
            use_cache = cfg.use_cache and not (self.training or return_state or state is not None)

        # 1. Embed; find where the rows go on from.
        hidden = embed(self.embeddings, input_ids, inputs_embeds)  # (b,l,d_model)
        batch, length = hidden.shape[:2]
        cache = one_cache(past_key_values, cache)
        if cache is None and use_cache:
            cache = FPRNNCache()
        state = self._state_to_go_on_from(batch, state, cache)
        wants_end = return_state or cache is not None

        # 2. Padding and documents, (b,l) each.
        mask = checked_mask(attention_mask, batch, length, cached=cache is not None)
        starts = document_starts(position_ids, seq_idx, batch, length)
        tokens = Tokens(hidden, input_ids, mask, starts).with_padding_on_the_right()
        if tokens.starts is not None:
            # There is nothing to leave behind in a row that begins; with a cache it goes on.
            tokens.starts[:, 0] &= state is not None and cache is None
        tokens = self._with_ids_of_ends(tokens)
        seqs = self._sequences(tokens.input_ids, tokens.mask, tokens.starts, state, wants_end)

        # 3. The layers.
        passed = self._through_layers(
            tokens.hidden, seqs, state, cache, output_hidden_states, count_iterations
        )
        is_checked = not defer_check or cache is not None
        if is_checked:
            self._check_finite(passed.is_finite)

        # 4. What is returned, padding back in its place.
        states = [tokens.put_back(hidden) for hidden in passed.states]
        end = self._end(tokens.input_ids, seqs, state, passed.ends) if wants_end else None
        if cache is not None:
            cache.state = end
            cache.length += length
        output = FPRNNOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
            fixed_point=self._report(passed.stats, tokens.back, states[-1].device),
            state=end if return_state else None,
            **{CACHE: cache},
            is_finite=None if is_checked else stack_flags(passed.is_finite),
        )
        return output if _as_dict(return_dict, cfg) else output.to_tuple()

    def _state_to_go_on_from(self, batch, state, cache):
        """The FPRNNState given by itself or in a cache; None for rows that begin.

        Raises:
            ValueError: both, a cache of another kind, or of another batch or model.
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

    def _with_ids_of_ends(self, tokens):
        """The tokens, and where their ids are not known, those of them that are EOS tokens, if a
        document starts after one."""
        cfg = self.config
        if tokens.input_ids is not None or not cfg.reset_at_eos or cfg.eos_token_id is None:
            return tokens
        return tokens._replace(
            input_ids=ends_among(tokens.hidden, self.embeddings, cfg.eos_token_id)
        )

    def _through_layers(self, hidden, seqs, state, cache, output_hidden_states, count_iterations):
        """The embedded tokens (b,l,d_model) through the layers and the final norm → Passed."""
        residual = None
        states, stats, ends = [], [], []
        is_finite = [all_finite(hidden)]  # not read here: each reading waits for the device
        for index, layer in enumerate(self.layers):
            if output_hidden_states:  # the layer reads the very tensor, so that it gets a gradient
                hidden = hidden if residual is None else residual + hidden
                residual = None
                states.append(hidden)
            if state is not None:
                seqs = seqs._replace(state=state.layers[index])
            if cache is not None:
                seqs = seqs._replace(kept=cache.kept(index))
            try:
                hidden, residual, layer_stats, *end = layer(
                    hidden, residual, seqs, count_iterations
                )
            except NonFiniteError as e:
                self._check_finite([*is_finite, torch.tensor(False)], str(e))
            is_finite.append(all_finite(hidden))
            if layer_stats is not None:
                stats.append(layer_stats)
            ends += end
        hidden = self.norm_f(residual + hidden)
        is_finite.append(all_finite(hidden))
        return Passed([*states, hidden], stats, ends, is_finite)

    def _report(self, stats, back, device):
        """The FixedPointReport of the layers' stats, padding back in its place; None without a
        fixed-point layer. device: of the report; layers may lie on several."""
        if not stats:
            return None
        *others, adjoint_norms = zip(*stats)
        fields = [
            None if field[0] is None else torch.stack([t.to(device) for t in field])
            for field in others
        ]
        written_later = None if adjoint_norms[0] is None else list(adjoint_norms)
        report = FixedPointReport([*fields, written_later], self.solved_layers)
        if back is not None and report.token_iters is not None:
            report.token_iters = report.token_iters.take_along_dim(back.unsqueeze(0), 2)
        return report

    def _check_finite(self, is_finite, symptom="its output is NaN or infinite"):
        """Read the flags of a pass at once; refuse the pass if one is False.

        Args:
            is_finite: (,) bool each: of the embeddings, of the layers' outputs, of the final norm.
            symptom: What was seen at the first place that is not finite.

        Raises:
            NonFiniteError: A flag is False; the error names the first such place.
        """
        self.refuse_nonfinite(read_flags(is_finite), symptom)

    def _places(self):
        """Return the places in which a pass may stop being finite: (name, module) each."""
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
            is_finite: FPRNNOutput.is_finite, or its values; None: the pass was checked before.
            symptom: Description of the failure there.

        Raises:
            NonFiniteError: A flag is False.
        """
        if isinstance(is_finite, torch.Tensor):
            is_finite = is_finite.tolist()
        if is_finite is not None and not all(is_finite):
            place, module = self._places()[is_finite.index(False)]
            raise explained(place, module, self.config, symptom) from None

    def _end(self, input_ids, seqs, state, ends):
        """The FPRNNState after the last token, from those of the layers."""
        if input_ids is None:
            return FPRNNState(tuple(ends), None)
        known = state is not None and state.last_token is not None
        before = state.last_token if known else input_ids.new_full(input_ids.shape[:1], -1)
        tokens = last(input_ids.unsqueeze(-1), 1, before[:, None, None], seqs)
        return FPRNNState(tuple(ends), tokens.flatten())


class FPRNNForCausalLM(FPRNNPreTrainedModel, GenerationMixin):
    """FPRNNModel with a language-model head, tied to the embedding or not."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012
    carries_state = True  # forward takes `state` and `return_state`

    def __init__(self, config: FPRNNConfig) -> None:
        super().__init__(config)
        self.backbone = FPRNNModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
        let_be_known(self)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """Do as GenerationMixin does, and add an empty cache if the prompt is read in chunks.

        Without chunks the first forward pass makes the cache; `generate` splits a prompt only if
        there is a cache before it.
        """
        in_chunks = generation_config.prefill_chunk_size is not None
        given = any(model_kwargs.get(name) is not None for name in ("past_key_values", "cache"))
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if in_chunks and not given and generation_config.use_cache is not False:
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
        """Next-token logits and, with labels, the mean cross-entropy.

        Args:
            labels: (b,l), shifted inside as everywhere in HuggingFace (labels = input_ids).
            logits_to_keep: only the last so many positions' logits (0: all), or a tensor: see
                loss.kept. The loss is then over these alone.
            loss_only: no logits; the loss is computed LOSS_CHUNK_TOKENS at a time.
            state, return_state, past_key_values, use_cache, position_ids, seq_idx,
                count_iterations and what is raised: see FPRNNModel.forward. The last target of a
                segment is the first token of the next: segments are trained with shift_labels.
            kwargs: shift_labels, (b,l): labels already shifted, shift_labels[t] is the token after
                input_ids[t]; wins over labels. num_items_in_batch: the number of targets of all
                micro-batches of an update, by which the sum over this one's is divided instead of
                their own number. −100 is no target in both kinds of labels.
                (transformers' Trainer would call for both kinds if both were named arguments.)
        """
        # 1. What is to be predicted, (b,l).
        targets = targets_of(labels, kwargs.pop("shift_labels", None))
        num_items = kwargs.get("num_items_in_batch")
        self._check_targets(targets, loss_only, logits_to_keep)
        if loss_only and use_cache is None:
            use_cache = False  # nothing is to go on from here

        # 2. The backbone: (b,l,d_model).
        outputs = self.backbone(
            input_ids,
            attention_mask,
            inputs_embeds,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            state=state,
            return_state=return_state,
            past_key_values=one_cache(past_key_values, cache),
            use_cache=use_cache,
            position_ids=position_ids,
            seq_idx=seq_idx,
            count_iterations=count_iterations,
            defer_check=True,
            **kwargs,
        )

        # 3. The head: logits (b,·,vocab_size), and the loss.
        hidden = outputs.last_hidden_state
        if loss_only:
            total = chunked_nll_sum(self.lm_head, hidden, targets, LOSS_CHUNK_TOKENS)
            logits, loss = None, total / number_of(targets, num_items)
        else:
            logits, loss = self._logits_and_loss(hidden, targets, logits_to_keep, num_items)
        self._check_finite(outputs.is_finite, logits, loss)
        output = FPRNNCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            fixed_point=outputs.fixed_point,
            state=outputs.state,
            **{CACHE: getattr(outputs, CACHE)},
        )
        return output if _as_dict(return_dict, self.config) else output.to_tuple()

    def _logits_and_loss(self, hidden, targets, logits_to_keep, num_items):
        """Return the logits (b,·,vocab_size) and, given targets, the loss over these positions."""
        logits = in_fp32(self.lm_head(kept(hidden, logits_to_keep)))
        if targets is None:
            return logits, None
        those = kept(targets, logits_to_keep)
        return logits, nll_sum(logits, those) / number_of(those, num_items)

    def _check_finite(self, of_backbone, logits, loss):
        """Read the flags of the whole pass at once; refuse the pass if one is False.

        Args:
            of_backbone: FPRNNOutput.is_finite; None if the backbone has read its own.
            logits, loss: What the head computed; None: not computed.

        Raises:
            NonFiniteError: A flag is False; the error names the first such place.
        """
        of_head = [all_finite(t) for t in (logits, loss) if t is not None]
        of_backbone = [] if of_backbone is None else list(of_backbone)
        flags = read_flags([*of_backbone, *of_head])
        self.backbone.refuse_nonfinite(flags[: len(of_backbone)])
        if not all(flags):
            symptom = "finite hidden states gave a logit or a loss that is NaN or infinite"
            raise explained("the head", self.lm_head, self.config, symptom)

    def _check_targets(self, targets, loss_only, logits_to_keep):
        """Raise a ValueError if a loss would be missing without a word."""
        if targets is None and loss_only:
            raise ValueError("loss_only needs labels or shift_labels")
        if loss_only and (torch.is_tensor(logits_to_keep) or logits_to_keep):
            raise ValueError("loss_only is of all tokens: logits_to_keep must be 0 with it")

    def solver(self, length: int | None = None) -> dict[str, Any] | str:
        """How the layers' solves go in the mode the model is in; see FixedPointBlock.solver. "none"
        where no layer is solved."""
        blocks = self.fixed_point_blocks()
        return blocks[0].solver(self._settings(), length) if blocks else "none"

    def flops_per_token(
        self, evaluations: float, training: bool = True, length: int | None = None
    ) -> float:
        """FLOPs per token with so many evaluations a token in every fixed-point layer.

        Training: the solve forward, then prepare, one evaluation (of one_step n_backwards)
        and finish forward and backward (three times the forward); the head likewise.
        Where the gradient goes through the solve itself, token by token, that evaluation is one of
        the solve's. What an adjoint iterates in windows is not counted: it is known afterwards
        only. A multiply-add counts two, and the number is affine in `evaluations`.

        Args: length: of the sequences, which attention's scores depend on; None: the longest.
        """
        length = length or self.config.max_position_embeddings
        solved = self.fixed_point_blocks()
        layers = [block.flops_per_token() for block in solved]
        once, step = sum(o for o, _ in layers), sum(s for _, s in layers)
        plain = [m for m in self.modules() if isinstance(m, PlainLayer)]
        once += sum(layer.flops_per_token(length) for layer in plain)
        head = 2 * self.lm_head.weight.numel()
        if not solved:
            return (3 if training else 1) * (once + head)
        block = solved[0]
        settings = self._settings()
        kind, how = settings.gradient, block.solver(settings)
        steps = settings.n_backwards if kind == "one_step" else 1
        differentiated = once + steps * step + head
        if kind == how["token"] == "exact" and how["schedule"] == "sequential":
            evaluations = evaluations - 1
        return evaluations * step + (3 if training else 1) * differentiated


class FPRNNForSequenceClassification(FPRNNPreTrainedModel):
    """FPRNNModel with a linear head on each row's last token, which has read all before it."""

    # Of a language model's checkpoint the head on top of the vocabulary is left out.
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012
    # The loss is a mean over rows: the Trainer divides it by the number of accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: FPRNNConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.backbone = FPRNNModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()
        let_be_known(self)

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
            input_ids, attention_mask, inputs_embeds, kwargs: See FPRNNModel.forward. Without a mask
                config.pad_token_id says which ids are padding, where it is set.
            labels: (b,) classes; (b,) numbers for one label; (b,num_labels) 0 or 1 for
                config.problem_type "multi_label_classification".
            use_cache: Has no effect; no cache is returned.

        Returns:
            logits (b,num_labels) in fp32, hidden_states if asked for, and with labels their loss.

        Raises:
            ValueError: Several rows, without a mask and a pad_token_id; or as FPRNNModel.forward.
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
        places = self._last_tokens(hidden, input_ids, attention_mask)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        logits = in_fp32(self.score(hidden[rows, places]))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config
            )
        output = SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states
        )
        return output if _as_dict(return_dict, self.config) else output.to_tuple()

    def _last_tokens(self, hidden, input_ids, attention_mask):
        """Place of every row's last token that is not padding, (b,)."""
        batch, length = hidden.shape[:2]
        if attention_mask is not None:
            is_token = attention_mask != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            is_token = input_ids != self.config.pad_token_id
        elif batch == 1:
            is_token = torch.ones(1, length, dtype=torch.bool)
        else:
            raise ValueError(
                f"a batch of {batch} rows needs an attention_mask, 0 at padding: input_ids and"
                " config.pad_token_id do not say where their last tokens are"
            )
        places = torch.arange(length, device=hidden.device)
        return (places * is_token.to(hidden.device)).argmax(1)


def _as_dict(return_dict, config):
    """Whether an output is returned as it is, or as a tuple."""
    return config.return_dict if return_dict is None else return_dict


__all__ = [
    "FPRNNForCausalLM",
    "FPRNNForSequenceClassification",
    "FPRNNModel",
    "FPRNNPreTrainedModel",
]
