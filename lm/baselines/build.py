"""`lm.config.load.Model` → the baselines whose classes live here, and transformers' Llama."""

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lm.common.errors import ConfigError
from lm.config.model import Model

from .delta_rule import fla_missing
from .deltanet import DeltaNetConfig, DeltaNetForCausalLM
from .lstm import LSTMConfig, LSTMForCausalLM
from .sizes import d_ff, heads
from .transformer import PositionConfig, PositionForCausalLM


def build_transformer(
    model: Model,
    vocab_size: int,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seq_len: int = 2048,
) -> PreTrainedModel:
    """Llama's blocks; `position: rope` is Llama itself, `nope` and `alibi` are PositionForCausalLM.

    Raises:
        ConfigError: as `heads`, or an odd head size, which RoPE cannot rotate.
    """
    num_heads = heads(model, model.d_model, "d_model")
    head_dim = model.d_model // num_heads
    if model.position == "rope" and head_dim % 2:
        raise ConfigError(
            f"model.d_model / n_heads is {head_dim}: RoPE rotates pairs, so it must be even; or set"
            " model.position to nope or alibi"
        )
    fields = dict(
        vocab_size=vocab_size,
        hidden_size=model.d_model,
        intermediate_size=d_ff(model),
        num_hidden_layers=model.n_layer,
        num_attention_heads=num_heads,
        max_position_embeddings=seq_len,
        rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=model.tie_embeddings,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=pad_token_id,
        use_cache=False,
    )
    if model.position == "rope":
        transformer = LlamaForCausalLM(LlamaConfig(**fields))
    else:
        transformer = PositionForCausalLM(PositionConfig(position=model.position, **fields))
    # Training makes no cache; generation does.
    transformer.generation_config.use_cache = True
    return transformer


def build_lstm(
    model: Model,
    vocab_size: int,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seq_len: int = 2048,
) -> LSTMForCausalLM:
    return LSTMForCausalLM(
        LSTMConfig(**_common(model, vocab_size, eos_token_id, pad_token_id, seq_len))
    )


def build_deltanet(
    model: Model,
    vocab_size: int,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seq_len: int = 2048,
    precision: str = "fp32",
) -> DeltaNetForCausalLM:
    """Gated DeltaNet; with more than one step a token, or without the gate, DeltaProduct.

    Raises:
        ConfigError: as `heads`, or `backend: fla` where it cannot run.
    """
    if model.backend == "fla":
        missing = fla_missing()
        if missing:
            raise ConfigError(
                f"model.backend is fla, but {missing}: set it to auto or plain, or install"
                " flash-linear-attention on a machine with a CUDA device"
            )
        if precision == "fp32":
            raise ConfigError(
                "model.backend is fla, whose kernels have no fp32: set train.precision to bf16, or"
                " model.backend to plain"
            )
    single = model.name == "gated_deltanet"
    negative = model.allow_neg_eigval
    config = DeltaNetConfig(
        n_heads=heads(model, model.d_model, "d_model"),
        expand=model.expand,
        d_conv=model.d_conv,
        d_ff=d_ff(model),
        n_householder=1 if single else model.n_householder,
        forget_gate=model.name != "deltaproduct",
        allow_neg_eigval=not single if negative == "auto" else negative,
        # Elsewhere the exported model takes what is there: `auto` is fla here.
        backend="auto" if model.backend == "fla" else model.backend,
        **_common(model, vocab_size, eos_token_id, pad_token_id, seq_len),
    )
    return DeltaNetForCausalLM(config)


def _common(model, vocab_size, eos_token_id, pad_token_id, seq_len):
    return dict(
        vocab_size=vocab_size,
        d_model=model.d_model,
        n_layer=model.n_layer,
        norm_epsilon=model.norm_epsilon,
        tie_embeddings=model.tie_embeddings,
        max_position_embeddings=seq_len,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
