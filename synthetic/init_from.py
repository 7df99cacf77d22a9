"""Initial weights from another synthetic run (`init_from`)."""

from __future__ import annotations

from pathlib import Path

import torch

from lm.common.errors import ConfigError
from lm.runs.checkpoint import list_checkpoints
from lm.runs.run_dir import RunDir
from lm.training.init_from import untied_weights
from lm.training.upcycle import SourceError, SourceModel, WeightMatch, match_weights
from synthetic.build import LoadedRun, load_run
from synthetic.config import Config, Task


def needs_initial_weights(cfg: Config, overwrite: bool) -> bool:
    """Return True if the run has an `init_from` and no checkpoint of its own to resume from."""
    if cfg.init_from is None:
        return False
    return overwrite or not list_checkpoints(RunDir(cfg.run_dir).checkpoints)


def match_initial_weights(cfg: Config, model: torch.nn.Module) -> WeightMatch:
    """Match the weights of the run `init_from` with the parameters of a model.

    Args:
        cfg: Config of the run, with an `init_from`.
        model: Model of the run.

    Raises:
        ConfigError: If the source is the run itself, or its weights do not match the model.
        SourceError: If the source is no trained synthetic run, or has another kind of model.
        CheckpointError: If the source's checkpoint is damaged.
    """
    settings = cfg.init_from
    assert settings is not None
    if Path(settings.path).expanduser().resolve() == Path(cfg.run_dir).resolve():
        raise ConfigError(
            f"init_from.path is {settings.path}, which is this run itself: choose another `name`"
        )
    source, source_run = _load_source(settings.path)
    task_difference = _describe_task_difference(source_run.cfg.task, cfg.task)
    return match_weights(source, model, settings.partial, model.config.vocab_size, task_difference)


def _load_source(path: str) -> tuple[SourceModel, LoadedRun]:
    """Load the trained synthetic run at `path`.

    Raises:
        SourceError: If there is no run.
    """
    run = RunDir(Path(path).expanduser())
    if not run.holds_run:
        raise SourceError(f"init_from.path is {path}, which is no run: it must be a synthetic run")
    # Building a model seeds all random generators: restore them afterwards.
    all_gpus = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=all_gpus):
        # Without `trust`, a `module:Class` is imported only if the new run's config names it too.
        source_run = load_run(run.path)
    model = source_run.model
    weights = untied_weights(model)
    return SourceModel(run.path, "a synthetic run", model.config, weights), source_run


def _describe_task_difference(source: Task, target: Task) -> str:
    """Describe differences of two tasks that may change what an id means; "" if there are none."""
    # These fields change which tokens are drawn or labelled, but no id.
    neutral = {"context", "pairs", "noise", "content", "depth", "supervision", "ngram", "stories"}
    old, new = source.model_dump(exclude=neutral), target.model_dump(exclude=neutral)
    differences = [
        f"task.{name} {old[name]} there, {new[name]} here" for name in new if new[name] != old[name]
    ]
    return f"it was trained on another task ({', '.join(differences)})" if differences else ""
