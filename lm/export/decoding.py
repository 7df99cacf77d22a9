"""Do teacher forcing and generation agree? A check of trained weights before they are exported.

A mixer of full rank can make a layer chaotic: a rounding error grows from token to token until a
whole pass over a text and token-by-token decoding of the same text have nothing in common
(docs/model.md, "Where a token has several solutions"). Scores of such a model describe another
model than the one that generates. Reflections have not been seen to do this, and are not checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm.export.export_code import ExportError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SEQUENCES, LENGTH = 4, 64
MAX_DIFFERENCE = 0.05  # of a token's logits, relative to their length
MAX_SHARE = 0.01  # of the tokens that may differ by more


def check_decoding(model: PreTrainedModel) -> None:
    """Refuse weights whose whole pass and cached decoding disagree.

    The model writes a few sequences itself, token by token; then it reads them in one pass.

    Raises:
        ExportError: The logits of more than MAX_SHARE of the tokens differ by more than
            MAX_DIFFERENCE.
    """
    mixers = _full_rank_mixers(model)
    if not mixers:
        return
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad():
        ids, decoded = _generate(model)
        whole = model(input_ids=ids).logits
    model.train(was_training)
    size = torch.linalg.vector_norm(decoded, dim=-1)
    off = torch.linalg.vector_norm(whole - decoded, dim=-1)
    share = (~(off <= MAX_DIFFERENCE * size)).double().mean().item()  # NaN is off
    if share > MAX_SHARE:
        raise ExportError(
            f"teacher forcing and generation disagree: at {share:.0%} of {ids.numel()} tokens that"
            f" the model wrote itself, the logits of one pass and of cached decoding differ by more"
            f" than {MAX_DIFFERENCE:.0%}. Its mixer ({', '.join(mixers)}) amplifies rounding from"
            " token to token. Train it from a start near the identity"
            " (model.mixer_gate_init_bias: -3) or bounded (model.contractive: 0.9)"
        )


def _full_rank_mixers(model: PreTrainedModel) -> list[str]:
    """Return the names of the mixers of full rank in layers that solve tokens exactly."""
    blocks = model.fixed_point_blocks() if hasattr(model, "fixed_point_blocks") else []
    exact = [block for block in blocks if block.config.token == "exact"]
    return sorted({block.config.mixer for block in exact if not block.mixer.has_low_rank})


def _generate(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Sample sequences with the cache.

    Returns:
        Token ids (SEQUENCES, LENGTH) and the logits that followed each, (SEQUENCES, LENGTH, V).
    """
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = torch.randint(model.config.vocab_size, (SEQUENCES, 1), device=model.device)
        output = model.generate(
            start,
            do_sample=True,
            top_k=0,
            min_new_tokens=LENGTH,
            max_new_tokens=LENGTH,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return output.sequences[:, :-1], torch.stack(output.logits, 1)
