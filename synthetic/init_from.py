"""Initial weights from another synthetic run (`init_from`)."""

from __future__ import annotations

from pathlib import Path

import torch

from lm.common.errors import ConfigError
from lm.common.files import write_json
from lm.runs.checkpoint import list_checkpoints
from lm.runs.run_dir import RunDir
from lm.training.build import check_section
from lm.training.upcycle import HEAD, SourceError, SourceModel, match_weights, pair_layers
from synthetic import centroids
from synthetic.build import LoadedRun, load_run
from synthetic.config import Config, Task
from synthetic.config import load as load_config


def needs_initial_weights(cfg: Config, overwrite: bool) -> bool:
    """Return True if the run has an `init_from` and no checkpoint of its own to resume from."""
    if cfg.init_from is None:
        return False
    return overwrite or not list_checkpoints(RunDir(cfg.run_dir).checkpoints)


def resolve_centroids(
    cfg: Config, overwrite: bool
) -> tuple[Config, centroids.FoundCentroids | None]:
    """Replace `model.state_centroids: auto` by a number.

    A new run takes the number of states of the source model, a resumed run the number in its own
    config.yaml. A layer whose partner in the source has centroids takes the partner's number.

    Args:
        cfg: Config of the run.
        overwrite: Start from scratch, whatever the run directory contains.

    Returns:
        The config, and the centroids that were found, or None.

    Raises:
        ConfigError: If the source has no states whose number could be found.
        SourceError: If the source is no trained synthetic run.
    """
    if "auto" not in cfg.model.centroid_counts:
        return cfg, None
    if not needs_initial_weights(cfg, overwrite):
        return cfg.adopt_centroids(load_config(RunDir(cfg.run_dir).config)), None
    assert cfg.init_from is not None
    _check_path(cfg)
    source, source_run = _load_source(cfg.init_from.path)
    if task_difference := _describe_task_difference(source_run.cfg.task, cfg.task):
        raise ConfigError(f"model.state_centroids is auto, but {source.path}: {task_difference}")
    # Centroids of any number show which layers have them.
    model_section = cfg.model.replace_auto_centroids(1)
    model = check_section(model_section, cfg.solver, cfg.train.lengths[1])
    partners = pair_layers(source.config, model.config)
    new_layers = centroids.find_new_layers(model, source_run.model, partners)
    if new_layers:
        found = centroids.find_centroids(source_run, sorted(set(new_layers.values())))
        return cfg.replace_auto_centroids(found.num_centroids), found
    if not any(source_run.cfg.model.centroid_counts):
        raise ConfigError(
            f"model.state_centroids is auto, but no layer of {source.path} becomes a layer with"
            " centroids: set it to a number"
        )
    return cfg.replace_auto_centroids(max(source_run.cfg.model.centroid_counts)), None


class InitialWeights:
    """Weights of a source run, matched with the parameters of the run that starts from them.

    The constructor refuses weights that do not fit. Only `apply` changes the model.

    Args:
        cfg: Config of the run, with an `init_from`.
        model: Model of the run.
        found_centroids: Centroids of the source if `resolve_centroids` has found them.

    Raises:
        ConfigError: If the source is the run itself, or its weights do not match the model.
        SourceError: If the source is no trained synthetic run, or has another kind of model.
        CheckpointError: If the source's checkpoint is damaged.
    """

    def __init__(
        self,
        cfg: Config,
        model: torch.nn.Module,
        found_centroids: centroids.FoundCentroids | None = None,
    ):
        settings = cfg.init_from
        assert settings is not None
        _check_path(cfg)
        self.model = model
        self.source, source_run = _load_source(settings.path)
        task_difference = _describe_task_difference(source_run.cfg.task, cfg.task)
        self.match = match_weights(
            self.source, model, settings.partial, model.config.vocab_size, task_difference
        )
        self.centroids = centroids.compute_centroids(
            model, self.match.partners, source_run, task_difference, found_centroids
        )

    def apply(self) -> list[str]:
        """Load the weights into the model, and return lines that describe them."""
        self.match.apply()
        return self.match.describe() + centroids.set_centroids(self.model, self.centroids)

    def write(self, run: RunDir) -> None:
        """Write a record of the loaded weights into the run directory."""
        write_json(run.init_from, self.match.record())


def _check_path(cfg: Config) -> None:
    """Raise ConfigError if the run would start from itself."""
    assert cfg.init_from is not None
    if Path(cfg.init_from.path).expanduser().resolve() == Path(cfg.run_dir).resolve():
        raise ConfigError(
            f"init_from.path is {cfg.init_from.path}, which is this run itself: choose another"
            " `name`"
        )


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
    config = source_run.model.config
    weights = dict(source_run.model.state_dict())
    if config.tie_embeddings:
        del weights[HEAD]
    return SourceModel(run.path, "a synthetic run", config, weights), source_run


def _describe_task_difference(source: Task, target: Task) -> str:
    """Describe differences of two tasks that may change what an id means; "" if there are none."""
    packing = {"context"}  # only the number of tokens per training row of a copying task
    old = source.model_dump(exclude=packing)
    new = target.model_dump(exclude=packing)
    differences = [
        f"task.{name} {old[name]} there, {new[name]} here" for name in new if new[name] != old[name]
    ]
    return f"it was trained on another task ({', '.join(differences)})" if differences else ""
