"""A run directory: every name in it, who may write there, and what a continued run may change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from lm.common.errors import (
    ConfigError,
    DivergedOnOneRank,
    UserError,
    describe_user_error,
    exit_status,
)
from lm.common.files import check_folder, printable, read_json, write_json, write_text, writing
from lm.common.secrets import mask_credentials
from lm.config.load import build
from lm.config.resuming import Resume, resume_rule
from lm.config.schema import Run
from lm.config.yaml_text import load_tree
from lm.runs.lease import Lease, LeaseError
from lm.runs.metrics import read_metrics
from lm.runs.places import RUN_FILE
from lm.runs.written import delete_files, foreign_files, run_file_test

# Keys that every version has written into a run's config.yaml; nobody types all of them.
WRITTEN_KEYS = {"name", "out_dir", "seed", "model", "train", "log", "sweep"}


class RunDirError(UserError, RuntimeError):
    """A run directory that cannot be used as asked; the message says why."""


def _named(name: str) -> property:
    return property(lambda self: self.path / name)


class RunDir:
    """The directory of one run."""

    config = _named(RUN_FILE)  # as it was trained, defaults and all
    tokenizer = _named("tokenizer")  # a folder, as HuggingFace has them
    data = _named("data")  # the prepared corpus
    checkpoints = _named("checkpoints")  # lm/runs/checkpoint.py
    metrics = _named("metrics.jsonl")  # the log
    result = _named("result.json")  # what the finished run reached
    failure = _named("failure.json")  # why it stopped before
    environment = _named("environment.json")  # versions and devices
    deepspeed = _named("deepspeed.json")  # DeepSpeed's configuration
    init_from = _named("init_from.json")  # what its weights were taken from, where not at random
    lease = _named("lease.json")  # who writes here now
    stacks = _named("stacks")  # of a run that stood still
    profile = _named("profile")  # a folder: what `log.profile` has written
    wandb_id = _named("wandb_id")
    tensorboard = _named("tensorboard")
    export = _named("hf")  # where the demo exports to
    figures = _named("figures")
    summary = _named("summary.json")  # of `fprnn report`
    evaluation = _named("eval.json")  # of `fprnn synthetic eval`

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._lease: Lease | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def holds_run(self) -> bool:
        return self.config.is_file()

    @property
    def is_finished(self) -> bool:
        return self.result.exists()

    @property
    def scores(self) -> Path:
        """Results of `fprnn eval`: of the run itself, else of its export."""
        own, exported = (place / "eval" / "results.json" for place in (self.path, self.export))
        return own if own.is_file() else exported

    @property
    def is_started(self) -> bool:
        """Whether anything was trained there: a checkpoint, a logged step, or a result."""
        logged = self.metrics.exists() and self.metrics.stat().st_size > 0
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return logged or saved or self.is_finished

    def claim(self, cfg: Run, overwrite: bool, say: Callable[[str], None] = print) -> None:
        """Make the directory ours, new or the same run continued; it stays ours until `release`.
        What a continued run may change is said by the fields of the schema
        (`lm.config.resuming`); its config.yaml stays as it was until `confirm`.

        A directory whose run never got to its first step (a start that failed) is made anew.

        Raises:
            RunDirError: it already holds a run and neither resume nor --overwrite was asked for;
                it holds something else; the run to be continued is another one, or has lost its
                config or its checkpoints.
            LeaseError: another process is at work there.
            OutputError: it cannot be written.

        Only files that a training writes are deleted: a directory that holds others is refused.
        """
        check_folder(self.path)
        ours = self.holds_run or self.lease.exists()
        if not self.holds_run and self.is_started and not (ours and overwrite):
            raise RunDirError(
                f"{self} holds what a run has left (a log, checkpoints or a result), and its"
                " config.yaml is gone: bring it back (a checkpoint's manifest.json holds it), or"
                " choose another `name`"
            )
        if not ours and self.path.exists() and any(self.path.iterdir()):
            raise RunDirError(f"{self} is not empty and holds no run: choose another `name`")
        if overwrite or not (self.holds_run and self.is_started):
            self._refuse_foreign_files()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lease = Lease(self.lease, say)
        lease.acquire()
        try:
            self._take(cfg, overwrite, say)
        except BaseException:
            lease.release()
            raise
        self._lease = lease

    def release(self) -> None:
        """Leave the directory to whoever comes next."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def check_ours(self) -> None:
        """Raises LeaseError when another process has taken the directory over."""
        if self._lease is not None:
            self._lease.check()

    def read_result(self, keys: tuple[str, ...]) -> dict:
        """`result.json` of a finished run.

        Raises:
            RunDirError: the run has not finished. DamagedError: the file holds something else.
        """
        if not self.is_finished:
            raise RunDirError(f"{self} has no result.json: training is unfinished")
        return printable(read_json(self.result, keys))

    def write_failure(self, error: Exception, is_main: bool = True) -> None:
        """Write why a run stopped, for `fprnn status`; `claim` deletes it.

        Rank 0 does, unless another rank knows better and was first.
        """
        if isinstance(error, LeaseError) or self.failure.exists():
            return
        if is_main or isinstance(error, DivergedOnOneRank):
            masked = mask_credentials(describe_user_error(error) or repr(error))
            with contextlib.suppress(Exception):  # the disk may be what failed
                write_json(self.failure, {"sentence": masked, "exit_code": exit_status(error)})

    def _take(self, cfg: Run, overwrite: bool, say: Callable[[str], None]) -> None:
        if self.holds_run and not overwrite and self.is_started:
            if cfg.resume == "never":
                raise RunDirError(
                    f"{self} already holds a run: continue it with resume=auto, choose another"
                    " `name`, or delete it with --overwrite"
                )
            _check_continued(cfg, self.config, say)
            if cfg.resume == "auto":
                self._refuse_lost_checkpoints()
            self.failure.unlink(missing_ok=True)
            return
        if self.holds_run or self.is_started:
            self._clear()
        self.failure.unlink(missing_ok=True)
        self.confirm(cfg)

    def _refuse_lost_checkpoints(self) -> None:
        """Raises RunDirError where a run that has saved has no checkpoint any more: it would begin
        anew over its log."""
        there = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        if any(not path.name.endswith(".partial") for path in there):
            return
        records = read_metrics(self.path)
        if self.is_finished or any("checkpoint" in record for record in records):
            made = max((record["step"] for record in records), default=None)
            raise RunDirError(
                f"{self} has {'finished' if made is None else f'made {made} updates'}, and its"
                f" checkpoints are gone from {self.checkpoints.name}/: bring them back, or train"
                " anew with --overwrite"
            )

    def confirm(self, cfg: Run) -> None:
        """The run goes on with this config: nothing is left that could refuse it."""
        with writing(self.checkpoints):
            self.checkpoints.mkdir(exist_ok=True)
        write_text(self.config, cfg.to_yaml())

    def _refuse_foreign_files(self) -> None:
        """Raise RunDirError if the directory holds a file that no training writes there."""
        if self.holds_run and not self._has_written_config():
            raise RunDirError(
                f"{self.config} is not a configuration that a training wrote, and nothing else of"
                " a run is there: choose another `name`, or move it away"
            )
        if names := foreign_files(self.path, run_file_test(self.path)):
            raise RunDirError(
                f"{self} holds files that no training wrote there ({names}), and the run would"
                " begin anew: move them away, or choose another `name`"
            )

    def _has_written_config(self) -> bool:
        """Return whether config.yaml is a training's own: every key is there, and no comment."""
        if any(self.checkpoints.glob("step-*/manifest.json")):
            return True
        try:
            tree = load_tree(self.config)
        except ConfigError:
            return False
        lines = self.config.read_text(encoding="utf-8").splitlines()
        return tree.keys() >= WRITTEN_KEYS and not any(line.startswith("#") for line in lines)

    def _clear(self) -> None:
        """Delete the run's files except the lease; config.yaml last, so that a directory that was
        half cleared is still known to hold a run."""
        is_own = run_file_test(self.path)
        keep = self.lease.name
        delete_files(self.path, lambda name: name != keep and is_own(name), (self.config.name,))


def comparable(cfg: Run) -> dict:
    """A configuration by dotted keys, its model and solver sections `settled`."""
    tree = cfg.model_dump(mode="json")
    model = settled(tree["model"], cfg.solver.iterates)
    return _flat({**tree, "model": model, "solver": cfg.solver.settled()})


def differences(was: Run, now: Run) -> dict[Resume, dict[str, str]]:
    """Return the keys that two configurations set differently, by what a resumed run may change.

    Returns:
        Rule → {dotted key: "KEY was 1, is 2"}. The solver of a baseline, which has none, is left
        out.
    """
    old, new = comparable(was), comparable(now)
    found: dict[Resume, dict[str, str]] = {rule: {} for rule in Resume}
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        has_effect = not key.startswith("solver.") or now.model.name == "fprnn"
        if before != after and has_effect:
            rule = resume_rule(type(now), key)
            found[rule][key] = f"{key} was {before!r}, is {after!r}"
    return found


def check_config(path: Path, manifest: dict, run: RunDir, cfg: Run) -> None:
    """Refuse a config that differs from a checkpoint's in what a resumed run may not change.

    The places of files may differ, and a tokenizer's files are compared themselves.

    Args:
        path: Folder of the checkpoint.
        manifest: Its manifest, which holds the config that it was trained with, except in runs of
            version 0.1.
        run: The run that it is of.
        cfg: The run's config as it is now.

    Raises:
        RunDirError: Such keys differ; it names each.
    """
    if "config" not in manifest:
        return
    was = build(manifest["config"], f"{path}/manifest.json: config", type(cfg), trained=True)
    changed = [
        text
        for key, text in differences(was, cfg)[Resume.FIXED].items()
        if not key.startswith("tokenizer.") and not key.endswith("path")
    ]
    if changed:
        raise RunDirError(
            f"{run.config} is not what {path} was trained with ({'; '.join(changed)}): bring it"
            " back as it was (the checkpoint's manifest.json holds it)"
        )


def settled(model: dict, iterates: bool) -> dict:
    """Return a model section with each "auto" of the mixer replaced: two sections that describe the
    same model are equal, whether they were written before there was an `auto` or after.

    Args:
        iterates: Whether the run's solver iterates the paper's map (`Solver.iterates`).
    """
    from lm.model.configuration_fprnn import resolve_gate_init_bias, resolve_mixer_bounds

    block, mixer = model.get("block", "fp_mamba1"), model.get("mixer", "householder")
    bounds = (model.get(name, "auto") for name in ("kronecker_norm", "contractive"))
    norm, kappa = resolve_mixer_bounds(block, mixer, *bounds)
    start = resolve_gate_init_bias(
        block, mixer, iterates, model.get("mixer_gate_init_bias", "auto")
    )
    return {**model, "kronecker_norm": norm, "contractive": kappa, "mixer_gate_init_bias": start}


def _flat(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        nested = isinstance(value, dict)
        flat.update(_flat(value, f"{prefix}{key}.") if nested else {prefix + key: value})
    return flat


def _check_continued(cfg: Run, saved: Path, say: Callable[[str], None]) -> None:
    """Refuse what a resumed run may not change, and print what changes its training.

    Args:
        cfg: The config to continue with.
        saved: The config.yaml that the run was trained with so far.
        say: Function that prints a sentence.

    Raises:
        RunDirError: It is a run of another config.
    """
    # Through the schema: a key that is newer than the run has its default there.
    was = build(load_tree(saved), str(saved), type(cfg))
    changed = differences(was, cfg)
    if changed[Resume.FIXED]:
        raise RunDirError(
            f"{saved.parent} holds a run of another config"
            f" ({'; '.join(changed[Resume.FIXED].values())}): choose another `name`, or delete it"
            " with --overwrite"
        )
    if noted := changed[Resume.NOTED]:
        say(f"note: {'; '.join(noted.values())}: training goes on with what it is now")
    if (steps := cfg.train.steps) != was.train.steps:
        say(f"note: train.steps was {was.train.steps}, is {steps}: the schedule ends at {steps}")
