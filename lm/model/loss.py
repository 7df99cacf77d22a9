"""The loss of next-token prediction: sums over targets, divided by what the caller counts.

Shapes: b batch, l length. This file travels with an exported checkpoint: it imports from its own
folder only.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # a target that is none


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels that are the input's own tokens → the token after each, IGNORED after the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def targets_of(
    labels: torch.Tensor | None, shift_labels: torch.Tensor | None
) -> torch.Tensor | None:
    """What is to be predicted at each token, (b,l): shift_labels, which are that already, else the
    labels `shifted`; None without either."""
    if shift_labels is None and labels is not None:
        return shifted(labels)
    return shift_labels


def kept(x: torch.Tensor, logits_to_keep: Any) -> torch.Tensor:
    """The positions of x (b,l,…) whose logits are wanted.

    Args:
        logits_to_keep: how many of the last (0: all), or a tensor: positions (k,), positions of
            each row (b,k), or bool (b,l), for which rows and positions become one dimension.
    """
    if not torch.is_tensor(logits_to_keep):
        return x[:, -logits_to_keep:] if logits_to_keep else x
    if logits_to_keep.dim() < 2:
        return x[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return x[logits_to_keep]
    index = logits_to_keep.reshape(*logits_to_keep.shape, *[1] * (x.dim() - 2))
    return x.take_along_dim(index, 1)


def in_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Logits in fp32, or wider where they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def nll_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy over the targets that are not IGNORED."""
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def log_z_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed log²Z over the targets that are not IGNORED, Z = Σ_v exp(logit_v) being what the
    softmax divides by (docs/recipes.md, "z-loss")."""
    log_z = in_fp32(logits).logsumexp(-1)
    return log_z.square().masked_fill(targets == IGNORED, 0.0).sum()


def chunked_nll_sum(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    chunk_tokens: int,
    log_z: bool = False,
) -> Any:
    """`nll_sum` of head(hidden) without ever holding all logits: those of a chunk of tokens are
    computed again in the backward.

    Args:
        head: hidden (…,d_model) → logits. hidden: (b,l,d_model). targets: (b,l).
        log_z: `log_z_sum` as well: the two sums.
    """

    def of_chunk(hidden, targets):
        logits = in_fp32(head(hidden))
        nll = nll_sum(logits, targets)
        return (nll, log_z_sum(logits, targets)) if log_z else nll

    chunks = zip(hidden.flatten(0, 1).split(chunk_tokens), targets.flatten().split(chunk_tokens))
    sums = [checkpoint(of_chunk, h, t, use_reentrant=False) for h, t in chunks]
    return tuple(map(sum, zip(*sums))) if log_z else sum(sums)


def number_of(
    targets: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """What a summed loss is divided by: num_items_in_batch, the number of targets in all
    micro-batches of an update, where it is known, else the number in this one; 1 at least."""
    if num_items_in_batch is None:
        return (targets != IGNORED).sum().clamp_min(1)
    return torch.as_tensor(num_items_in_batch, device=targets.device).clamp_min(1)
