"""A warning before a run whose updates will take minutes, from a piece of one that is timed."""

from __future__ import annotations

import torch

from lm.common.console import duration
from lm.config.schema import Config
from lm.report.estimate import on_the_meta_device
from lm.report.measure import time_pass
from lm.report.plan import layers_of
from lm.training.build import build_model

PROBED_TOKENS = 2  # of each sequence: seconds even where a whole window takes a minute
PROBED_VOCABULARY = 64  # embedding and head hardly count where a solve is slow
LOADED_S = 5.0  # that loading libraries takes at most, in the first pass
SLOW_S = 60.0  # seconds of an update: more is said before the run starts


def warn_if_slow(cfg: Config, world_size: int) -> str | None:
    """Return a sentence about a run whose updates will take minutes, before it starts.

    Layers that are iterated in PyTorch (mixers of full rank; on a GPU all that no kernel solves)
    can take hours for what a householder does in seconds, and nothing is printed before the first
    update is done. So a few tokens of a micro-batch are trained here. Other models are not timed.

    Args:
        world_size: Ranks of the run.

    Returns:
        The sentence; None: an update is predicted to take less than `SLOW_S`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    meta = on_the_meta_device(cfg, PROBED_VOCABULARY)
    layers = layers_of(cfg, meta, device.type == "cuda")
    if layers.iterated == layers.at_once:
        return None
    length = min(PROBED_TOKENS, cfg.data.seq_len)
    with torch.random.fork_rng(), device:
        model = build_model(cfg, PROBED_VOCABULARY).train()
        ids = torch.randint(0, PROBED_VOCABULARY, (cfg.train.micro_batch_size, length))
        pieces = cfg.data.seq_len / length * cfg.train.accumulation(world_size)
        seconds = time_pass(model, ids, cfg)
        if SLOW_S / pieces < seconds < LOADED_S:  # some of it may have loaded libraries
            seconds = time_pass(model, ids, cfg)
    if (predicted := seconds * pieces) <= SLOW_S:
        return None
    slow = {b.config.mixer for b in meta.fixed_point_blocks() if not b.mixer.has_low_rank}
    mixers = ", ".join(sorted(slow)) or cfg.model.mixer
    return (
        f"note: an update will take about {duration(predicted)} or more here (measured: {length} of"
        f" the {cfg.data.seq_len} tokens), because mixer {mixers} is iterated in PyTorch;"
        " model.mixer=dplr is solved token by token, in a small part of that"
    )
