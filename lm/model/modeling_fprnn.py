"""The HuggingFace classes: FPRNNModel (backbone) and FPRNNForCausalLM, with loss and generation.

Shapes: b batch, l length. This file and those it imports travel with an exported checkpoint.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput

from .blocks import FPRNN, FPMamba1, FPMamba2, build_block
from .configuration_fprnn import FPRNNConfig
from .fixed_point import FixedPointBlock
from .layers import Orthogonal, RMSNorm, WNLinear, residual_norm
from .mixers import added
from .non_finite import NonFiniteError, all_finite, explained
from .scan import selective_scan
from .solver import FixedPointStats
from .state import FPRNNCache, FPRNNState, Sequences, last, padding_to_the_right
from .step import finish

# transformers copies only files that the modeling file itself names; these keep the list whole.
_TRAVELS = (FPRNN, added, selective_scan, finish)

# Versions up to 0.1 called a WNLinear's direction its weight. (transformers saves a model under the
# names that it was loaded with.)
NORMED = (
    "u_down", "u_proj", "alpha_proj", "uv_proj", "gate_proj", "bc_y_proj", "dt_y_proj", "z_y_proj",
)  # fmt: skip
OLD_NAMES = {f"{name}.weight": f"{name}.direction" for name in NORMED}
LOSS_CHUNK_TOKENS = 4096  # tokens whose logits exist at once when only the loss is wanted


@dataclass
class FPRNNOutput(ModelOutput):
    """last_hidden_state (b,l,d_model); hidden_states, one per layer and the last; fixed_point, the
    solver's FixedPointStats with tensors of shape (n_layer,b); state, and past_key_values (an
    FPRNNCache), if they were asked for."""

    last_hidden_state: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    fixed_point: FixedPointStats | None = None
    state: FPRNNState | None = None
    past_key_values: FPRNNCache | None = None


@dataclass
class FPRNNCausalLMOutput(ModelOutput):
    """loss (scalar); logits (b,l,vocab_size) in fp32, None under `loss_only`; the rest as in
    FPRNNOutput."""

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    fixed_point: FixedPointStats | None = None
    state: FPRNNState | None = None
    past_key_values: FPRNNCache | None = None


class FPRNNLayer(nn.Module):
    """residual += hidden; hidden = block(norm(residual))."""

    def __init__(self, config):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = residual_norm(config)
        self.block = build_block(config)

    def forward(self, hidden, residual, seqs=Sequences()):  # noqa: B008
        residual = hidden if residual is None else residual + hidden
        if self.residual_in_fp32:
            residual = residual.to(torch.promote_types(residual.dtype, torch.float32))
        hidden, *rest = self.block(self.norm(residual), seqs)  # its stats, and its state if asked
        return hidden, residual, *rest


class FPRNNPreTrainedModel(PreTrainedModel):
    """Initialisation and loading shared by the model classes."""

    config_class = FPRNNConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FPRNNLayer"]  # noqa: RUF012
    _is_stateful = True
    # exp() and softplus() of these need more digits than half precision has.
    _keep_in_fp32_modules_strict = ["A_log", "D", "dt_proj.bias", "dt_bias"]  # noqa: RUF012

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    @classmethod
    def from_pretrained(cls, *args, key_mapping=None, **kwargs):
        """PreTrainedModel.from_pretrained; also of checkpoints that use names of 0.1."""
        return super().from_pretrained(*args, key_mapping=key_mapping or OLD_NAMES, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module):
        """Mamba's initialisation (docs/model.md, 'Initialisation'). Only `init.*` calls: they leave
        alone what a checkpoint has loaded."""
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear | nn.Conv1d):
            normed = isinstance(module, WNLinear)
            weight = module.direction if normed else module.weight
            init.kaiming_uniform_(weight, a=math.sqrt(5))
            if module.bias is not None:
                init.zeros_(module.bias)
            if normed:
                init.copy_(module.gain, torch.linalg.vector_norm(weight, dim=1, keepdim=True))
        elif isinstance(module, RMSNorm | nn.LayerNorm):
            init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                init.zeros_(module.bias)
        elif isinstance(module, Orthogonal):
            init.zeros_(module.weight)
            init.orthogonal_(module.base)
        elif isinstance(module, FixedPointBlock):
            self._init_block(module)

    def _init_block(self, module):
        cfg = self.config
        init.kaiming_uniform_(module.out_proj.weight, a=math.sqrt(5))
        init.copy_(module.out_proj.weight, module.out_proj.weight / math.sqrt(cfg.n_layer))
        if isinstance(module, FPMamba1):
            n = torch.arange(1, cfg.d_state + 1, dtype=torch.float32, device=module.A_log.device)
            init.copy_(module.A_log, n.log().expand(cfg.d_inner, -1))
            bound = cfg.dt_rank**-0.5
            init.uniform_(module.dt_proj.weight, -bound, bound)
            dt_bias = module.dt_proj.bias
        elif isinstance(module, FPMamba2):
            A = torch.empty(module.heads, device=module.A_log.device).uniform_(1, 16)
            init.copy_(module.A_log, A.log())
            dt_bias = module.dt_bias
        else:
            return
        init.ones_(module.D)
        low, high = math.log(1e-3), math.log(1e-1)
        u = torch.rand(dt_bias.shape, device=dt_bias.device)
        dt = torch.exp(low + u * (high - low)).clamp_min(1e-4)
        init.copy_(dt_bias, dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹


class FPRNNModel(FPRNNPreTrainedModel):
    """Embedding, n_layer fixed-point blocks on an fp32 residual stream, final norm."""

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(FPRNNLayer(config) for _ in range(config.n_layer))
        self.norm_f = residual_norm(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def set_input_embeddings(self, value):
        self.embeddings = value

    def _sequences(self, input_ids, attention_mask, state=None, return_state=False):
        """Padding and document starts of a batch; None where there are none."""
        mask = starts = None
        eos = self.config.eos_token_id
        if attention_mask is not None and not attention_mask.all():
            mask = attention_mask.bool()
        if input_ids is not None and self.config.reset_at_eos and eos is not None:
            starts = F.pad(input_ids[:, :-1] == eos, (1, 0))
            if state is not None and state.last_token is not None:
                starts[:, 0] = state.last_token == eos
            if mask is not None:
                starts &= mask  # padding may be EOS tokens; it must leave the state as it is
            starts = starts if starts.any() else None
        return Sequences(mask, starts, return_state=return_state)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        output_hidden_states=None,
        return_dict=None,
        state=None,
        return_state=False,
        past_key_values=None,
        use_cache=None,
        **kwargs,
    ):
        """input_ids (b,l), or inputs_embeds (b,l,d_model); attention_mask (b,l), 0 at padding on
        either side → FPRNNOutput.

        Args:
            state: the FPRNNState that an earlier pass returned: the rows go on from there.
            return_state: return the FPRNNState after each row's last token. It has no gradient, so
                a stream processed in segments is trained by truncated backpropagation.
            past_key_values, use_cache: the same for `generate`: an FPRNNCache to start from and to
                update, or a new one. attention_mask may then be of all tokens so far.
        Raises:
            ValueError: both or neither of input_ids and inputs_embeds, another batch's or model's
                state or cache, or both a state and a cache.
            NonFiniteError: something became NaN or infinite; names the layer, cause and cure.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        back, cache = None, past_key_values
        if cache is None and use_cache:
            cache = FPRNNCache()
        if cache is not None:
            if state is not None:
                raise ValueError("give one of state and past_key_values")
            if not isinstance(cache, FPRNNCache):
                raise ValueError(f"past_key_values is a {type(cache).__name__}, not an FPRNNCache")
            state, return_state = cache.state, True
            if attention_mask is not None:
                attention_mask = attention_mask[:, -hidden.shape[1] :]
        if state is not None:
            state.check(len(hidden), self.config)
        if attention_mask is not None and not attention_mask.all():
            # Nothing may stand between a row's state, or the first window, and its first token.
            order, back = padding_to_the_right(attention_mask.bool())
            attention_mask = attention_mask.take_along_dim(order, 1)
            hidden = hidden.take_along_dim(order.unsqueeze(-1), 1)
            input_ids = None if input_ids is None else input_ids.take_along_dim(order, 1)
        seqs = self._sequences(input_ids, attention_mask, state, return_state)
        residual, states, stats, ends = None, [], [], []
        finite = [all_finite(hidden)]  # read once, at the end: each reading waits for the device
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                states.append(hidden if residual is None else residual + hidden)
            if state is not None:
                seqs = seqs._replace(state=state.layers[index])
            try:
                hidden, residual, layer_stats, *end = layer(hidden, residual, seqs)
            except NonFiniteError as e:
                self._check_finite([*finite, torch.tensor(False)], str(e))
            finite.append(all_finite(hidden))
            stats.append(layer_stats)
            ends += end
        hidden = self.norm_f(residual + hidden)
        self._check_finite([*finite, all_finite(hidden)], "its output is NaN or infinite")
        states.append(hidden)
        if back is not None:
            states = [h.take_along_dim(back.unsqueeze(-1), 1) for h in states]
        stats = zip(*stats)  # layers may lie on several devices
        stats = (torch.stack([t.to(hidden.device) for t in field]) for field in stats)
        fixed_point = FixedPointStats(*stats)
        if back is not None:
            token_iters = fixed_point.token_iters.take_along_dim(back.unsqueeze(0), 2)
            fixed_point = fixed_point._replace(token_iters=token_iters)
        end = self._end(input_ids, seqs, state, ends) if return_state else None
        if cache is not None:
            cache.state, cache.length = end, cache.length + hidden.shape[1]
        output = FPRNNOutput(
            states[-1], tuple(states) if output_hidden_states else None, fixed_point, end, cache
        )
        return output if return_dict is not False else output.to_tuple()

    def _check_finite(self, finite, what):
        """finite: (,) bool each, of the embeddings, the layers' outputs, and the final norm's.

        Raises:
            NonFiniteError: one is False; names the first.
        """
        finite = torch.stack([flag.cpu() for flag in finite]).tolist()
        if all(finite):
            return
        first = finite.index(False)
        places = [("the embedded input", self.embeddings)]
        places += [(f"layer {index}", layer) for index, layer in enumerate(self.layers)]
        places += [("the final norm", self.norm_f)]
        raise explained(*places[first], self.config, what) from None

    def _end(self, input_ids, seqs, state, ends):
        """The FPRNNState after the last token, from those of the layers."""
        if input_ids is None:
            return FPRNNState(tuple(ends), None)
        known = state is not None and state.last_token is not None
        before = state.last_token if known else input_ids.new_full((len(input_ids),), -1)
        tokens = last(input_ids.unsqueeze(-1), 1, before[:, None, None], seqs)
        return FPRNNState(tuple(ends), tokens.flatten())

    def contraction(self, input_ids, attention_mask=None, power_iterations=10):
        """How contractive every layer's iteration is on these tokens (see blocks.contraction).

        Returns:
            mixing (n_layer,b): the largest ‖I − Q_t‖₂; lipschitz (n_layer,b): ‖∂f/∂y‖₂ at y*.
        """
        seqs, residual, rows = self._sequences(input_ids, attention_mask), None, []
        with torch.no_grad():
            hidden = self.embeddings(input_ids)
            for layer in self.layers:
                before = hidden if residual is None else residual + hidden
                rows.append(layer.block.contraction(layer.norm(before), seqs, power_iterations))
                hidden, residual, _ = layer(hidden, residual, seqs)
        mixing, lipschitz = zip(*rows)
        return torch.stack(mixing), torch.stack(lipschitz)


class FPRNNForCausalLM(FPRNNPreTrainedModel, GenerationMixin):
    """FPRNNModel with a language-model head, tied to the embedding or not."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012
    carries_state = True  # forward takes `state` and `return_state`

    def __init__(self, config):
        super().__init__(config)
        self.backbone = FPRNNModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        labels=None,
        shift_labels=None,
        logits_to_keep=0,
        loss_only=False,
        output_hidden_states=None,
        return_dict=None,
        state=None,
        return_state=False,
        past_key_values=None,
        use_cache=None,
        **kwargs,
    ):
        """Next-token logits and, with labels, the mean cross-entropy.

        Args:
            labels: (b,l), shifted inside as everywhere in HuggingFace (labels = input_ids).
            shift_labels: (b,l), already shifted: shift_labels[t] is the token after input_ids[t];
                wins over labels. −100 is ignored in both.
            logits_to_keep: only the last so many positions' logits (0: all).
            loss_only: no logits; the loss is computed LOSS_CHUNK_TOKENS at a time.
            state, return_state, past_key_values, use_cache: see FPRNNModel.forward. The last target
                of a segment is the first token of the next: segments are trained with shift_labels.
        """
        outputs = self.backbone(
            input_ids, attention_mask, inputs_embeds, output_hidden_states=output_hidden_states,
            state=state, return_state=return_state, past_key_values=past_key_values,
            use_cache=use_cache,
        )  # fmt: skip
        hidden = outputs.last_hidden_state
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        loss = logits = None
        if loss_only:
            if shift_labels is None:
                raise ValueError("loss_only needs labels or shift_labels")
            loss = self._chunked_loss(hidden, shift_labels)
        else:
            keep = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
            logits = self.lm_head(hidden[:, keep])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if shift_labels is not None:
                targets = shift_labels[:, keep]
                loss = _nll(logits.flatten(0, 1), targets.flatten()) / _count(targets)
        if loss is not None and self.training:
            loss = loss + outputs.fixed_point.penalty.mean()
        if not all(all_finite(t) for t in (logits, loss) if t is not None):
            what = "finite hidden states gave a logit or a loss that is NaN or infinite"
            raise explained("the head", self.lm_head, self.config, what)
        output = FPRNNCausalLMOutput(
            loss, logits, outputs.hidden_states, outputs.fixed_point, outputs.state,
            outputs.past_key_values,
        )  # fmt: skip
        return output if return_dict is not False else output.to_tuple()

    def _chunked_loss(self, hidden, targets):
        """Mean cross-entropy without ever holding all logits: each chunk's are computed again in
        the backward."""

        def chunk_nll(h, t):
            logits = self.lm_head(h)
            return _nll(logits.to(torch.promote_types(logits.dtype, torch.float32)), t)

        pairs = zip(
            hidden.flatten(0, 1).split(LOSS_CHUNK_TOKENS),
            targets.flatten().split(LOSS_CHUNK_TOKENS),
        )
        total = sum(checkpoint(chunk_nll, h, t, use_reentrant=False) for h, t in pairs)
        return total / _count(targets)

    def solver(self, length=None):
        """How the layers' solves go in the mode the model is in; see FixedPointBlock.solver."""
        return self.backbone.layers[0].block.solver(length)

    def flops_per_token(self, num_iters, training=True):
        """FLOPs per token with `num_iters` (ℓ*) iterations per layer.

        Training: the solve forward, then prepare, gradient steps and finish forward and backward
        (three times the forward); the head likewise. A multiply-add counts two.
        """
        layers = [layer.block.flops_per_token() for layer in self.backbone.layers]
        once, step = sum(o for o, _ in layers), sum(s for _, s in layers)
        head = 2 * self.lm_head.weight.numel()
        differentiated = once + self.config.n_backwards * step + head
        return num_iters * step + (3 if training else 1) * differentiated


def _nll(logits, targets):
    """Summed cross-entropy over targets that are not −100."""
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def _count(targets):
    return (targets != -100).sum().clamp_min(1)


__all__ = ["FPRNNForCausalLM", "FPRNNModel", "FPRNNPreTrainedModel"]
