"""Check that teacher forcing and generation agree, before a model is exported.

A mixer of full rank can make a layer chaotic: rounding errors grow from token to token, until one
forward pass over a text and token-by-token decoding of the same text give unrelated logits
(docs/proofs.md, "Where a token has several solutions"). Teacher-forced scores of such a model do
not describe the text that it generates. Mixers of low rank have not shown this and are not checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm.export.export_code import ExportError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SEQUENCE_COUNT = 4  # generated sequences
LENGTH = 64  # tokens in each sequence
MAX_DIFFERENCE = 0.05  # 2-norm of the difference of a token's logits, relative to their 2-norm
MAX_SHARE = 0.01  # share of tokens that may exceed MAX_DIFFERENCE


def check_decoding(model: PreTrainedModel) -> None:
    """Refuse a model whose logits differ between one forward pass and cached decoding.

    The model generates a few sequences token by token, and then reads them in one forward pass.

    Raises:
        ExportError: If the logits differ by more than MAX_DIFFERENCE at more than MAX_SHARE of the
            tokens.
    """
    mixer_names = _find_full_rank_mixers(model)
    if not mixer_names:
        return
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad():
        ids, decoding_logits = _generate(model)
        forward_logits = model(input_ids=ids).logits
    model.train(was_training)
    norm = torch.linalg.vector_norm(decoding_logits, dim=-1)
    difference = torch.linalg.vector_norm(forward_logits - decoding_logits, dim=-1)
    is_close = difference <= MAX_DIFFERENCE * norm  # (sequences, tokens); False for NaN
    share = (~is_close).double().mean().item()
    if share > MAX_SHARE:
        raise ExportError(
            f"teacher forcing and generation disagree: at {share:.0%} of {ids.numel()} generated"
            " tokens, the logits of a single pass and of cached decoding differ by more than"
            f" {MAX_DIFFERENCE:.0%}. The mixer ({', '.join(mixer_names)}) amplifies rounding errors"
            " from token to token. Train with a mixer that starts near the identity"
            " (model.mixer_gate_init_bias: -3) or is bounded (model.contractive: 0.9)"
        )


def _find_full_rank_mixers(model: PreTrainedModel) -> list[str]:
    """Return the names of the full-rank mixers in layers that solve each token exactly."""
    # Models of transformers have no fixed-point layers, and not this method.
    blocks = model.fixed_point_blocks() if hasattr(model, "fixed_point_blocks") else []
    exact_blocks = [block for block in blocks if block.config.token == "exact"]
    return sorted({block.config.mixer for block in exact_blocks if not block.mixer.has_low_rank})


def _generate(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Sample sequences from a random first token, with the cache.

    Returns:
        Token ids, shape (SEQUENCE_COUNT, LENGTH), and the logits that cached decoding computed
        after each of them, shape (SEQUENCE_COUNT, LENGTH, vocabulary).
    """
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        first_ids = torch.randint(model.config.vocab_size, (SEQUENCE_COUNT, 1), device=model.device)
        output = model.generate(
            first_ids,
            do_sample=True,
            top_k=0,
            min_new_tokens=LENGTH,
            max_new_tokens=LENGTH,
            output_logits=True,
            return_dict_in_generate=True,
        )
    # The last sampled token has no logits after it.
    return output.sequences[:, :-1], torch.stack(output.logits, 1)
