"""What our own recurrent baselines share: configuration, padding, loss, generation.

Shapes: b batch, l length. This file travels with an exported checkpoint.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.configuration_utils import PretrainedConfig
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import PreTrainedModel


class BaselineConfig(PretrainedConfig):
    """The fields that every baseline of ours has. Subclasses name a `model_type` and add theirs."""

    attribute_map = {  # noqa: RUF012 (HuggingFace's convention)
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init_subclass__(cls, **kwargs):
        # transformers makes a dataclass of every subclass; the __init__ that it would generate for
        # one without its own never calls ours, and the defaults below would be lost.
        cls.__init__ = cls.__init__
        super().__init_subclass__(**kwargs)

    def __init__(
        self,
        vocab_size=50280,
        d_model=768,
        n_layer=12,
        norm_epsilon=1e-5,
        tie_embeddings=True,
        max_position_embeddings=2048,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **kwargs,
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
    residual_outputs = ()  # names of the linear maps that end a branch

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


@dataclass
class StatefulOutput(CausalLMOutput):
    """CausalLMOutput, and the state if it was asked for."""

    state: tuple[tuple[torch.FloatTensor, ...], ...] | None = None


class Backbone(nn.Module):
    """Embedding, layers, final norm. A layer maps (b,l,d_model) to itself and is causal.

    One that carries a state also takes `layer(x, state, lengths, return_state=True)` and then
    returns its output and its state after each row's last token: a tuple of tensors with the batch
    first, without gradient. state: what it returned before, or None; lengths: (b,), or None for l.
    """

    def __init__(self, config, make_layer):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(make_layer(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.d_model, config.norm_epsilon)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        state=None,
        return_state=False,
    ):
        """input_ids (b,l) or inputs_embeds (b,l,d_model); attention_mask (b,l), 0 at padding.

        Padded tokens are moved behind the others, where a causal layer cannot see them, and their
        outputs back to their places: to the states they are the identity.

        Returns:
            (b,l,d_model), and the tuple of the layers' states, None unless `return_state`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if state is not None:
            _check(state, len(hidden), len(self.layers))
        order = lengths = None
        if attention_mask is not None and not attention_mask.all():
            order = torch.argsort((attention_mask == 0).to(torch.int8), dim=1, stable=True)
            hidden = hidden.take_along_dim(order.unsqueeze(-1), 1)
            lengths = (attention_mask != 0).sum(1)
        ends = []
        for index, layer in enumerate(self.layers):
            if state is None and not return_state:
                hidden = layer(hidden)
            else:
                start = None if state is None else state[index]
                hidden, end = layer(hidden, start, lengths, True)
                ends.append(end)
        hidden = self.norm(hidden)
        if order is not None:
            hidden = hidden.take_along_dim(order.argsort(1).unsqueeze(-1), 1)
        return hidden, tuple(ends) if return_state else None


def _check(state, batch, n_layer):
    """Raise a ValueError unless this is the state of `batch` streams and `n_layer` layers."""
    if len(state) != n_layer:
        raise ValueError(f"the state is of {len(state)} layers, the model has {n_layer}")
    rows = state[0][0].shape[0]
    if rows != batch:
        raise ValueError(f"the state is of a batch of {rows}, the input's batch is {batch}")


class BaselineForCausalLM(BaselinePreTrainedModel, GenerationMixin):
    """A backbone of `layer_class` layers and a head, tied to the embedding or not."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
    layer_class = None
    carries_state = False  # whether its layers take and return a state (see Backbone)

    def __init__(self, config):
        super().__init__(config)
        self.model = Backbone(config, self.layer_class)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embeddings

    def set_input_embeddings(self, value):
        self.model.embeddings = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        # No cache: every new token is a forward pass over the whole prefix.
        return {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": 1}

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        labels=None,
        shift_labels=None,
        logits_to_keep=0,
        return_dict=None,
        state=None,
        return_state=False,
        **kwargs,
    ):
        """Next-token logits (fp32) and, with labels, the mean cross-entropy.

        Args:
            labels: (b,l), shifted inside as everywhere in HuggingFace (labels = input_ids).
            shift_labels: (b,l), already shifted; wins over labels. −100 is ignored in both.
            logits_to_keep: only the last so many positions' logits (0: all).
            state: what an earlier pass returned: the rows go on from there. return_state: return
                the state after each row's last token, without gradient.
        Raises:
            ValueError: another batch's state, or any for a model without `carries_state`.
        """
        if (return_state or state is not None) and not self.carries_state:
            raise ValueError(f"{type(self).__name__} cannot start from a state or return one")
        hidden, end = self.model(input_ids, attention_mask, inputs_embeds, state, return_state)
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        keep = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
        logits = self.lm_head(hidden[:, keep])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = None
        if shift_labels is not None:
            targets = shift_labels[:, keep].flatten()
            nll = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
            loss = nll / (targets != -100).sum().clamp_min(1)
        output = StatefulOutput(loss=loss, logits=logits, state=end)
        return output if return_dict is not False else output.to_tuple()
