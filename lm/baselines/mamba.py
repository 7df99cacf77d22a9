"""Mamba (Gu & Dao 2023) from transformers, sized by the same fields as ours."""

from transformers import MambaConfig, MambaForCausalLM


def build_mamba(model, vocab_size, eos_token_id=None, pad_token_id=None, seq_len=2048):
    """`lm.config.Model` → MambaForCausalLM. The short convolution is part of Mamba, always on."""
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=vocab_size,
            hidden_size=model.d_model,
            num_hidden_layers=model.n_layer,
            state_size=model.d_state,
            expand=model.expand,
            conv_kernel=model.d_conv,
            time_step_rank=model.dt_rank,
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
    )
