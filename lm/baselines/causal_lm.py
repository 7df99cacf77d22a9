"""What our own recurrent baselines share: configuration, padding, loss, generation.

Shapes: b batch, l length. This file travels with an exported checkpoint.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PretrainedConfig
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.modeling_utils import PreTrainedModel

from .inputs import checked_mask, document_starts, embed, refuse_unknown
from .loss import in_fp32, kept, nll_sum, number_of, targets_of
from .names import initialise_once, let_be_known

States = tuple[tuple[Tensor, ...], ...]  # of every layer, the tensors that it carries on


class BaselineConfig(PretrainedConfig):
    """The fields that every baseline of ours has. Subclasses name a `model_type` and add theirs."""

    attribute_map = {  # noqa: RUF012 (HuggingFace's convention)
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
    }
    keys_to_ignore_at_inference = ["state"]  # noqa: RUF012 (it is no prediction)

    def __init_subclass__(cls, **kwargs):
        # transformers makes a dataclass of every subclass; the __init__ that it would generate for
        # one without its own never calls ours, and the defaults below would be lost.
        cls.__init__ = cls.__init__  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)

    def __init__(
        self,
        vocab_size: int = 50280,
        d_model: int = 768,
        n_layer: int = 12,
        norm_epsilon: float = 1e-05,
        tie_embeddings: bool = True,
        max_position_embeddings: int = 2048,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.n_layer = n_layer
        self.norm_epsilon = norm_epsilon
        self.tie_embeddings = kwargs.pop("tie_word_embeddings", tie_embeddings)
        self.max_position_embeddings = max_position_embeddings
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=self.tie_embeddings,
            **kwargs,
        )


class BaselinePreTrainedModel(PreTrainedModel):
    """Initialisation: normal with σ = 0.02, what ends a residual branch divided by √(2 n_layer)."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    residual_outputs: tuple[str, ...] = ()  # names of the linear maps that end a branch

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    @torch.no_grad()
    def _init_weights(self, module):
        """Only `init.*` calls: they leave alone what a checkpoint has loaded."""
        if isinstance(module, nn.Embedding | nn.Linear):
            init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        for name in self.residual_outputs:
            if hasattr(module, name):
                std = 0.02 / (2 * self.config.n_layer) ** 0.5
                init.normal_(getattr(module, name).weight, std=std)

    def _initialize_weights(self, module, *args, **kwargs):
        initialise_once(self, module)
        super()._initialize_weights(module, *args, **kwargs)


@dataclass
class BaselineOutput(BaseModelOutput):
    """BaseModelOutput, and the state if it was asked for."""

    state: tuple[tuple[torch.FloatTensor, ...], ...] | None = None


@dataclass
class StatefulOutput(CausalLMOutput):
    """CausalLMOutput, and the state if it was asked for."""

    state: tuple[tuple[torch.FloatTensor, ...], ...] | None = None


class Rows:
    """The tokens of a batch laid out in rows that a causal layer may read from left to right, and
    what it makes of them back in their places.

    Without documents: as they are, padding moved behind the other tokens, where no layer sees it.
    With them: a row for each.
    """

    def __init__(self, mask: torch.Tensor | None, starts: torch.Tensor | None):
        """mask: (b,l) bool, False at padding, or None; starts: (b,l) bool, True at the first token
        of a document, or None."""
        # (b,l) which token of its row comes when; None: as they are
        self.order: torch.Tensor | None = None
        # (b,) tokens of each row; None: all
        self.lengths: torch.Tensor | None = None
        # (tokens,) which of the batch, row after row, are none of padding
        self.tokens: torch.Tensor | None = None
        if starts is not None:
            self._one_row_a_document(mask, starts)
        elif mask is not None:
            self.order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
            self.lengths = mask.sum(1)

    def _one_row_a_document(self, mask: torch.Tensor | None, starts: torch.Tensor) -> None:
        # 1. The tokens (b,l), and where a document begins: at a start, and at a row's first token.
        is_token = torch.ones_like(starts) if mask is None else mask
        is_first = is_token & (is_token.cumsum(1) == 1)
        begins = (starts & is_token) | is_first
        # 2. Of every token, in the order of the batch: (tokens,) its document's number from 0.
        tokens = is_token.flatten().nonzero().squeeze(1)
        self.tokens = tokens
        self.document = begins.flatten()[tokens].cumsum(0) - 1
        # 3. And its place in the document, from 0.
        lengths = self.document.bincount()
        before = lengths.cumsum(0) - lengths  # tokens of all documents before each
        in_order = torch.arange(len(tokens), device=starts.device)
        self.place = in_order - before[self.document]
        self.shape = (len(lengths), int(lengths.max()))

    def lay_out(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b,l,·) → (rows,·,·)"""
        if self.tokens is not None:
            rows = x.new_zeros(*self.shape, x.shape[-1])
            return rows.index_put((self.document, self.place), x.flatten(0, 1)[self.tokens])
        return x if self.order is None else x.take_along_dim(self.order.unsqueeze(-1), 1)

    def back(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What `lay_out` gave, through layers → (b,l,·); zero at padding among documents. like:
        (b,l,·)"""
        if self.tokens is not None:
            flat = rows.new_zeros(like.shape[:2].numel(), rows.shape[-1])
            flat = flat.index_put((self.tokens,), rows[self.document, self.place])
            return flat.unflatten(0, like.shape[:2])
        if self.order is None:
            return rows
        return rows.take_along_dim(self.order.argsort(1).unsqueeze(-1), 1)


class BaselineModel(BaselinePreTrainedModel):
    """Embedding, layers of `layer_class`, final norm. A layer maps (b,l,d_model) to itself and is
    causal.

    One that carries a state also takes `layer(x, state, lengths, return_state=True)` and then
    returns its output and its state after each row's last token: a tuple of tensors with the batch
    first, without gradient. state: what it returned before, or None; lengths: (b,), or None for l.
    """

    layer_class: type[nn.Module]
    carries_state = False  # whether its layers take and return a state

    def __init__(self, config: BaselineConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.d_model, config.norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        state: States | None = None,
        return_state: bool = False,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaselineOutput | tuple:
        """input_ids (b,l) or inputs_embeds (b,l,d_model); attention_mask (b,l), 0 at padding →
        BaselineOutput.

        Args:
            output_hidden_states, return_dict: None as the config says.
            state: what an earlier pass returned: the rows go on from there. return_state: return
                the state after each row's last token, without gradient.
            position_ids, seq_idx: (b,l) or (1,l); a document starts where position_ids do not go
                up, or seq_idx changes, and starts from an empty state.
            kwargs: see inputs.refuse_unknown.
        Raises:
            ValueError: both or neither of input_ids and inputs_embeds, no tokens, ids outside the
                vocabulary, a mask or positions of another shape; another batch's state, or any
                for a model without `carries_state`, or for packed documents.
            TypeError: an unknown keyword argument.
        """
        # 1. The inputs: hidden (b,l,d_model), mask (b,l) or None, starts (b,l) or None.
        has_documents = position_ids is not None or seq_idx is not None
        refuse_unknown(type(self).__name__, kwargs, has_documents)
        embedded = embed(self.embeddings, input_ids, inputs_embeds)
        batch, length = embedded.shape[:2]
        mask = checked_mask(attention_mask, batch, length)
        starts = document_starts(position_ids, seq_idx, batch, length)
        if starts is not None and not starts[:, 1:].any() and state is None:
            starts = None  # every row is one document
        if return_state or state is not None:
            self._check_state(state, batch, starts)

        # 2. Rows that a causal layer may read: (rows,·,d_model).
        rows = Rows(mask, starts)
        hidden = rows.lay_out(embedded)

        # 3. The layers, each from its own state, where one is carried.
        read, hidden, ends = self._through_layers(hidden, state, rows.lengths, return_state)

        # 4. Back to (b,l,d_model), each token in its place.
        hidden = rows.back(self.norm(hidden), embedded)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states = None
        if output_hidden_states:
            hidden_states = (*(rows.back(x, embedded) for x in read), hidden)
        output = BaselineOutput(
            last_hidden_state=hidden,
            hidden_states=hidden_states,
            state=tuple(ends) if return_state else None,
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _through_layers(self, hidden, state, lengths, return_state):
        """Rows (rows,·,d_model) through the layers → what each layer read, what the last one gave,
        and the state that each ended in, where one is given or asked for.

        Args:
            state, return_state: as of `forward`. lengths: (rows,) tokens of each row; None: all.
        """
        read = []
        ends = []
        for index, layer in enumerate(self.layers):
            read.append(hidden)
            if state is None and not return_state:
                hidden = layer(hidden)
            else:
                start = None if state is None else state[index]
                hidden, end = layer(hidden, start, lengths, True)
                ends.append(end)
        return read, hidden, ends

    def _check_state(self, state, batch, starts):
        """Raise a ValueError unless the model can go on from this state (None: from nothing), and
        return one, for `batch` rows of one document each.

        Args:
            starts: (b,l) where documents start, or None.
        """
        name = type(self).__name__
        if not self.carries_state:
            raise ValueError(f"{name} cannot start from a state or return one")
        if starts is not None:
            raise ValueError(
                f"{name} takes a state, or returns one, for rows of one document each:"
                " position_ids and seq_idx cannot start others"
            )
        if state is None:
            return
        if len(state) != len(self.layers):
            raise ValueError(
                f"the state is of {len(state)} layers, the model has {len(self.layers)}"
            )
        rows = state[0][0].shape[0]
        if rows != batch:
            raise ValueError(f"the state is of a batch of {rows}, the input's batch is {batch}")


class BaselineForCausalLM(BaselinePreTrainedModel, GenerationMixin):
    """A BaselineModel and a head, tied to the embedding or not."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
    model_class: type[BaselineModel]

    def __init__(self, config: BaselineConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
        let_be_known(self)

    @property
    def carries_state(self) -> bool:
        """Whether forward takes `state` and `return_state`."""
        return self.model.carries_state

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        # No cache: every new token is a forward pass over the whole prefix.
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "output_hidden_states": kwargs.get("output_hidden_states"),
            "logits_to_keep": 1,
        }

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        state: States | None = None,
        return_state: bool = False,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> StatefulOutput | tuple:
        """Next-token logits (fp32) and, with labels, the mean cross-entropy.

        Args:
            labels: (b,l), shifted inside as everywhere in HuggingFace (labels = input_ids).
            logits_to_keep: only the last so many positions' logits (0: all), or a tensor: see
                loss.kept. The loss is then over these alone.
            output_hidden_states, return_dict, state, return_state, position_ids, seq_idx and what
                is raised: see BaselineModel.forward.
            kwargs: shift_labels, (b,l), already shifted; wins over labels. num_items_in_batch: the
                number of targets of all micro-batches of an update, by which the sum over this
                one's is divided. −100 is no target in both kinds of labels. (transformers' Trainer
                would call for both kinds if both were named arguments.)
        """
        targets = targets_of(labels, kwargs.pop("shift_labels", None))
        outputs = self.model(
            input_ids,
            attention_mask,
            inputs_embeds,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            state=state,
            return_state=return_state,
            position_ids=position_ids,
            seq_idx=seq_idx,
            **kwargs,
        )
        logits = in_fp32(self.lm_head(kept(outputs.last_hidden_state, logits_to_keep)))
        loss = None
        if targets is not None:
            targets = kept(targets, logits_to_keep)
            loss = nll_sum(logits, targets) / number_of(targets, kwargs.get("num_items_in_batch"))
        output = StatefulOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, state=outputs.state
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()
