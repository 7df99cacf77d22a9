"""Memory and peak performance of the GPUs that a run can be planned for."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from lm.common.errors import ConfigError

GIB = 2**30


class Card(NamedTuple):
    """Figures of a GPU's data sheet, or of the CPU.

    Attributes:
        name: Name for `--gpu`.
        memory: Bytes, as CUDA reports them.
        peak: Precision → dense FLOP/s (fp32 without TF32); None if unknown.
        on_gpu: False for the CPU.
    """

    name: str
    memory: float
    peak: dict[str, float] | None
    on_gpu: bool = True


CARDS = {
    card.name: card
    for card in (
        Card("a100-40g", 39.4 * GIB, {"bf16": 312e12, "fp32": 19.5e12}),
        Card("a100-80g", 79.1 * GIB, {"bf16": 312e12, "fp32": 19.5e12}),
        Card("l40s", 44.5 * GIB, {"bf16": 362e12, "fp32": 91.6e12}),
        Card("h100-80g", 79.1 * GIB, {"bf16": 989e12, "fp32": 67e12}),
        Card("h200", 139.8 * GIB, {"bf16": 989e12, "fp32": 67e12}),
    )
}
DEFAULT_CARD = "a100-80g"
CARD_FORMAT = (
    "NAME:TFLOPS:GIB, such as b200:2250:178 (dense TFLOP/s in the precision of the run, memory in"
    " GiB)"
)
# A layer that is solved token by token takes TOKEN_S + batch size · SEQUENCE_S seconds per token,
# forward and backward. Measured on an H100 with d_inner 1,536 and one reflection, and used for all
# cards. The layer was untrained and used Picard's search, which needs 52, 104 and 158 evaluations
# for the slowest of 16, 64 and 128 sequences. Today's search starts with Newton and needs 7 to 8.
TOKEN_S, SEQUENCE_S = 62.0e-6, 0.622e-6
CPU = "cpu"


def find_card(name: str) -> Card:
    """Return the card of a given name.

    Args:
        name: A card of CARDS, `cpu` for this machine, or NAME:TFLOPS:GIB for any other.

    Raises:
        ConfigError: If the name is unknown.
    """
    if name == CPU:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Card(CPU, float(memory), None, on_gpu=False)
    if ":" in name:
        return _parse_card(name)
    if name not in CARDS:
        raise ConfigError(
            f"--gpu {name}: unknown card; known are {', '.join(CARDS)}, and {CPU} for this machine"
            f" without a GPU. Describe any other card by its data sheet: {CARD_FORMAT}"
        )
    return CARDS[name]


def _parse_card(text: str) -> Card:
    """Parse NAME:TFLOPS:GIB.

    Raises:
        ConfigError: If the text has other fields, or if a number is not finite and above 0.
    """
    name, *fields = text.split(":")
    try:
        tflops, gib = map(float, fields)
        is_valid = bool(name) and 0 < tflops < math.inf and 0 < gib < math.inf
    except ValueError:  # not two fields, or not numbers
        is_valid = False
    if not is_valid:
        raise ConfigError(f"--gpu {text}: a card that is not listed must be {CARD_FORMAT}")
    peak = dict.fromkeys(("bf16", "fp32"), tflops * 1e12)
    return Card(name, gib * GIB, peak)


def find_local_card() -> Card | None:
    """Return the card of this machine's GPU; None without a GPU, or if CARDS lacks it."""
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    name = device.name.lower().replace(" ", "")
    for card in CARDS.values():
        has_same_memory = abs(card.memory - device.total_memory) < 0.1 * card.memory
        if card.name.partition("-")[0] in name and has_same_memory:
            return card
    return None
