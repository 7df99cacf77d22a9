"""Cards that a run can be planned for: memory and peak."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from lm.common.errors import ConfigError

GIB = 2**30


class Card(NamedTuple):
    """A GPU, by its data sheet, or the CPU."""

    name: str
    memory: float  # bytes, as CUDA reports them
    peak: dict[str, float] | None  # dense FLOP/s by precision, fp32 without TF32; None: unknown
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
DEFAULT = "a100-80g"
DESCRIBED = (
    "NAME:TFLOPS:GIB, such as b200:2250:178 (dense TFLOP/s in the precision of the run, memory in"
    " GiB)"
)
# Seconds of a token in a layer that is solved token by token, forward and backward, and their
# growth with the sequences. Measured on an H100 with d_inner 1,536 and one reflection, and taken
# for all cards. The layer was untrained and used Picard's search, which needs 52, 104 and 158
# evaluations for the slowest of 16, 64 and 128 sequences; Newton's needs 7 to 8 (docs/kernels.md).
TOKEN_S, SEQUENCE_S = 62.0e-6, 0.622e-6
CPU = "cpu"


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use (macOS: all)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_card(name: str) -> Card:
    """Return the card of a name.

    Args:
        name: A card of CARDS, `cpu` for this machine, or NAME:TFLOPS:GIB for any other.

    Raises:
        ConfigError: If there is no such card.
    """
    if name == CPU:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Card(CPU, float(memory), None, on_gpu=False)
    if ":" in name:
        return _described_card(name)
    if name not in CARDS:
        raise ConfigError(
            f"--gpu {name}: no such card is known here; known are {', '.join(CARDS)}, and {CPU} for"
            f" this machine without one. Any other is described by its data sheet: {DESCRIBED}"
        )
    return CARDS[name]


def _described_card(text: str) -> Card:
    """Return the card that NAME:TFLOPS:GIB describes.

    Raises:
        ConfigError: Other fields than these, or one that is no number above 0.
    """
    name, *fields = text.split(":")
    try:
        tflops, gib = map(float, fields)
    except ValueError:
        tflops = gib = math.nan
    if not name or not all(0 < value < math.inf for value in (tflops, gib)):
        raise ConfigError(f"--gpu {text}: a card that is not listed is {DESCRIBED}")
    peak = dict.fromkeys(("bf16", "fp32"), tflops * 1e12)
    return Card(name, gib * GIB, peak)


def detect_gpu_name() -> str:
    """Return the name of this machine's GPU, or DEFAULT if there is none or it is not listed."""
    import torch

    if not torch.cuda.is_available():
        return DEFAULT
    device = torch.cuda.get_device_properties(0)
    name = device.name.lower().replace(" ", "")
    for known in CARDS.values():
        is_near = abs(known.memory - device.total_memory) < 0.1 * known.memory
        if known.name.partition("-")[0] in name and is_near:
            return known.name
    return DEFAULT
