"""The devices that a run can be planned for: memory, peak, and the links between them."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from lm.common.errors import ConfigError

GIB = 2**30


class Card(NamedTuple):
    """One GPU, by its maker's data sheet; `memory` is what CUDA reports of it, a little less."""

    name: str
    memory: float  # bytes
    peak: dict[str, float] | None  # precision → dense FLOP/s (fp32: without TF32); None: not known
    nvlink: float  # bytes/s that it sends to those of its host; 0: PCIe alone
    bandwidth: float | None = None  # bytes/s of its memory; None: not known
    on_gpu: bool = True


# NVLink: the data sheet's number is of both directions, half of it is sent.
CARDS = {
    card.name: card
    for card in (
        Card("a100-40g", 39.4 * GIB, {"bf16": 312e12, "fp32": 19.5e12}, 300e9, 1.555e12),
        Card("a100-80g", 79.1 * GIB, {"bf16": 312e12, "fp32": 19.5e12}, 300e9, 2.039e12),
        Card("l40s", 44.5 * GIB, {"bf16": 362e12, "fp32": 91.6e12}, 0.0, 0.864e12),
        Card("h100-80g", 79.1 * GIB, {"bf16": 989e12, "fp32": 67e12}, 450e9, 3.35e12),
        Card("h200", 139.8 * GIB, {"bf16": 989e12, "fp32": 67e12}, 450e9, 4.8e12),
    )
}
DEFAULT = "a100-80g"
DESCRIBED = (
    "NAME:TFLOPS:GIB:TBPS, such as b200:2250:178:8 (dense TFLOP/s in the precision of the run,"
    " memory in GiB and its TB/s)"
)
# Seconds of one token of a layer's exact recurrence, forward and backward, and the part that grows
# with the sequences. Measured on an H100 (d_inner 1,536, one reflection) and assumed for the other
# cards. The layer was untrained, and Picard's search needed 52, 104 and 158 evaluations for the
# slowest of 16, 64 and 128 sequences; the present search needs 7 to 8 and has not run on a card.
TOKEN_S, SEQUENCE_S = 62.0e-6, 0.622e-6
REACHED = 0.7  # the share of its bandwidth that a card reaches; an H100's clone: 0.87
PCIE = 25e9  # bytes/s between the GPUs of a host without NVLink, version 4 with 16 lanes
# bytes/s a GPU to other hosts: one InfiniBand port of 400 Gb/s (NDR) each, as DGX H100 has.
INFINIBAND = 50e9
CPU = "cpu"
GPUS_A_HOST = 8


def usable_cores() -> int:
    """CPU cores that this process may run on; all of the machine where the system does not say
    (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def card(name: str) -> Card:
    """Return the card of a name.

    Args:
        name: A card of CARDS; NAME:TFLOPS:GIB:TBPS describes any other; `cpu` is this machine, its
            memory shared by all its ranks.

    Raises:
        ConfigError: No such card; the message lists them.
    """
    if name == CPU:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Card(CPU, float(memory), None, PCIE, on_gpu=False)
    if ":" in name:
        return _described_card(name)
    if name not in CARDS:
        raise ConfigError(
            f"--gpu {name}: no such card is known here; known are {', '.join(CARDS)}, and {CPU} for"
            f" this machine without one. Any other is described by its data sheet: {DESCRIBED}"
        )
    return CARDS[name]


def _described_card(text: str) -> Card:
    """Return the card that NAME:TFLOPS:GIB:TBPS describes; its links are PCIe.

    Raises:
        ConfigError: Other fields than these, or one that is no number above 0.
    """
    name, *fields = text.split(":")
    try:
        tflops, gib, tbps = map(float, fields)
    except ValueError:
        tflops = gib = tbps = math.nan
    if not name or not all(0 < value < math.inf for value in (tflops, gib, tbps)):
        raise ConfigError(f"--gpu {text}: a card that is not listed is {DESCRIBED}")
    peak = dict.fromkeys(("bf16", "fp32"), tflops * 1e12)
    return Card(name, gib * GIB, peak, nvlink=0.0, bandwidth=tbps * 1e12)


def here() -> str:
    """The name of this machine's GPU; DEFAULT where there is none, or none that is known."""
    import torch

    if not torch.cuda.is_available():
        return DEFAULT
    of_device = torch.cuda.get_device_properties(0)
    named = of_device.name.lower()
    found = [c for c in CARDS.values() if c.name.partition("-")[0] in named.replace(" ", "")]
    near = [c for c in found if abs(c.memory - of_device.total_memory) < 0.1 * c.memory]
    return near[0].name if near else DEFAULT
