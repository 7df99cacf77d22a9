"""`init_from`: a training that starts from the weights of another synthetic run."""

from __future__ import annotations

from pathlib import Path

import torch

from lm.common.errors import ConfigError
from lm.common.files import write_json
from lm.runs.checkpoint import list_checkpoints
from lm.runs.run_dir import RunDir
from lm.training.upcycle import HEAD, Source, SourceError, match_weights
from synthetic import centroids
from synthetic.build import Loaded, load_run
from synthetic.config import Config, Task


def is_needed(cfg: Config, overwrite: bool) -> bool:
    """Whether the run begins anew from another's weights: where it goes on from a checkpoint of its
    own, nothing of `init_from` is read."""
    if cfg.init_from is None:
        return False
    return overwrite or not list_checkpoints(RunDir(cfg.run_dir).checkpoints)


class Start:
    """The weights that a run starts from, and which of its own they become. Making one refuses what
    does not fit, and changes nothing.

    Args:
        cfg: of the run, with an `init_from`. model: the run's.
    Raises:
        ConfigError: the run itself, or a model that does not match. SourceError: no trained
            synthetic run, or one of another model than ours. CheckpointError: a damaged one.
    """

    def __init__(self, cfg: Config, model: torch.nn.Module):
        wanted = cfg.init_from
        assert wanted is not None
        if Path(wanted.path).expanduser().resolve() == Path(cfg.run_dir).resolve():
            raise ConfigError(
                f"init_from.path is {wanted.path}, which is this run itself: choose another `name`"
            )
        self.source, loaded = _read(wanted.path)
        self.model = model
        other_task = _other_task(loaded.cfg.task, cfg.task)
        self.match = match_weights(
            self.source,
            model,
            wanted.partial,
            model.config.vocab_size,
            other_task,
        )
        match = self.match
        self.centroids = centroids.new_centroids(
            model, match.new, match.partners, loaded, other_task
        )

    def apply(self) -> list[str]:
        """Give the model the weights → what was taken, in words."""
        self.match.apply()
        return self.match.describe() + centroids.start(self.model, self.centroids)

    def write(self, run: RunDir) -> None:
        """Write down what was taken."""
        write_json(run.init_from, self.match.record())


def _read(path: str) -> tuple[Source, Loaded]:
    """The model of a trained synthetic run."""
    run = RunDir(Path(path).expanduser())
    if not run.holds_run:
        raise SourceError(f"init_from.path is {path}, which is no run: it must be a synthetic run")
    all_gpus = range(torch.cuda.device_count())  # building a model seeds all generators
    with torch.random.fork_rng(devices=all_gpus):
        loaded = load_run(run.path)  # its module is imported if our own configuration names it
    config = loaded.model.config
    weights = dict(loaded.model.state_dict())
    if config.tie_embeddings:
        del weights[HEAD]
    return Source(run.path, "a synthetic run", config, weights), loaded


def _other_task(theirs: Task, ours: Task) -> str:
    """In what two tasks differ, in words: an id may mean another thing in each. "": in nothing."""
    packing = {"context"}  # how many tokens copying packs together: no id means another thing
    there = theirs.model_dump(exclude=packing)
    here = ours.model_dump(exclude=packing)
    names = [name for name in here if here[name] != there[name]]
    differing = [f"task.{name} {there[name]} there, {here[name]} here" for name in names]
    return f"it was trained on another task ({', '.join(differing)})" if differing else ""
