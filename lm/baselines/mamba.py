"""Mamba (Gu & Dao 2023) and Mamba-2 (Dao & Gu 2024) from transformers, sized as ours."""

from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from lm.common.errors import ConfigError
from lm.config.model import Model

from .sizes import heads


def build_mamba(
    model: Model,
    vocab_size: int,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seq_len: int = 2048,
) -> MambaForCausalLM:
    """`Model` → MambaForCausalLM. The short convolution is part of Mamba, always on."""
    config = MambaConfig(
        time_step_rank=model.dt_rank,
        **_common(model, vocab_size, eos_token_id, pad_token_id, seq_len),
    )
    return _initialised(MambaForCausalLM(config))


def build_mamba2(
    model: Model,
    vocab_size: int,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seq_len: int = 2048,
) -> Mamba2ForCausalLM:
    """`lm.config.load.Model` → Mamba2ForCausalLM with n_heads · head size = expand · d_model.

    Raises:
        ConfigError: heads that do not divide that width, or groups that do not divide the heads.
    """
    width = model.expand * model.d_model
    num_heads = heads(model, width, "expand · d_model")
    if num_heads % model.ngroups:
        raise ConfigError(
            f"model.ngroups is {model.ngroups}: it must divide the {num_heads} heads of Mamba-2"
        )
    config = Mamba2Config(
        num_heads=num_heads,
        head_dim=width // num_heads,
        n_groups=model.ngroups,
        # Only speed depends on it; the kernels want a power of two from 16 on.
        chunk_size=min(256, max(16, 1 << (seq_len - 1).bit_length())),
        **_common(model, vocab_size, eos_token_id, pad_token_id, seq_len),
    )
    return _initialised(Mamba2ForCausalLM(config))


def _initialised(mamba):
    """transformers would divide out_proj by √n_layer again, each time the weights are loaded."""
    mamba.config.rescale_prenorm_residual = False
    return mamba


def _common(model, vocab_size, eos_token_id, pad_token_id, seq_len):
    return dict(
        vocab_size=vocab_size,
        hidden_size=model.d_model,
        num_hidden_layers=model.n_layer,
        state_size=model.d_state,
        expand=model.expand,
        conv_kernel=model.d_conv,
        layer_norm_epsilon=model.norm_epsilon,
        residual_in_fp32=model.residual_in_fp32,
        tie_word_embeddings=model.tie_embeddings,
        initializer_range=0.02,
        rescale_prenorm_residual=True,
        max_position_embeddings=seq_len,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=pad_token_id,
        use_cache=False,
    )
