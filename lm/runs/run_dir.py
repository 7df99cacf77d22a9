"""Run directories: names of files, claiming for writing, comparing configs when resuming."""

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
from lm.runs.owned_files import delete_files, describe_foreign_files, make_run_file_test
from lm.runs.path_checks import RUN_FILE

# Keys that every version writes into config.yaml; a file written by hand rarely has all of them.
WRITTEN_KEYS = {"name", "out_dir", "seed", "model", "train", "log", "sweep"}


class RunDirError(UserError, RuntimeError):
    """A run directory that cannot be used. The message names the reason."""


def _named(name: str) -> property:
    return property(lambda self: self.path / name)


class RunDir:
    """The directory of a run."""

    config = _named(RUN_FILE)  # config of the training, with all defaults
    tokenizer = _named("tokenizer")  # folder in HuggingFace's format
    data = _named("data")  # the prepared corpus
    checkpoints = _named("checkpoints")  # lm/runs/checkpoint.py
    metrics = _named("metrics.jsonl")
    result = _named("result.json")  # final results
    failure = _named("failure.json")  # reason of a stop or failure
    environment = _named("environment.json")  # versions and devices
    deepspeed = _named("deepspeed.json")  # DeepSpeed's configuration
    init_from = _named("init_from.json")  # source of the initial weights
    lease = _named("lease.json")  # process that writes here
    stacks = _named("stacks")  # stacks of a hanging run
    profile = _named("profile")  # folder of `log.profile`
    wandb_id = _named("wandb_id")
    tensorboard = _named("tensorboard")
    export = _named("hf")  # export made by the demo
    figures = _named("figures")
    summary = _named("summary.json")  # written by `fprnn report`
    evaluation = _named("eval.json")  # written by `fprnn synthetic eval`

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._lease: Lease | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def holds_run(self) -> bool:
        """True if the directory has a config.yaml."""
        return self.config.is_file()

    @property
    def is_finished(self) -> bool:
        """True if the directory has a result.json."""
        return self.result.exists()

    @property
    def eval_results(self) -> Path:
        """Results of `fprnn eval` for the run, or for its export if the run has none."""
        paths = [folder / "eval" / "results.json" for folder in (self.path, self.export)]
        return paths[0] if paths[0].is_file() else paths[1]

    @property
    def is_started(self) -> bool:
        """True if the directory has a checkpoint, a logged step, or a result."""
        has_log = self.metrics.exists() and self.metrics.stat().st_size > 0
        has_checkpoints = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return has_log or has_checkpoints or self.is_finished

    def claim(self, cfg: Run, overwrite: bool, say: Callable[[str], None] = print) -> None:
        """Claim the directory for writing, for a new run or to continue the run in it.

        It stays claimed until `release`. config.yaml stays unchanged until `save_config`. A run
        that never made a step (its start failed) is replaced. Only files that a training writes are
        deleted: a directory with other files is refused.

        Args:
            cfg: Configuration of the run. `lm.config.resuming` has the keys that may change when a
                run is continued.
            overwrite: Delete the run that the directory holds.
            say: Prints a sentence.

        Raises:
            RunDirError: If the directory holds a run and neither `resume` nor `overwrite` is set,
                or other files, or a run with another config, or a run without its config or its
                checkpoints.
            LeaseError: If another process writes there.
            OutputError: If the directory cannot be written.
        """
        check_folder(self.path)
        is_run_dir = self.holds_run or self.lease.exists()
        if not self.holds_run and self.is_started and not (is_run_dir and overwrite):
            raise RunDirError(
                f"{self} holds files of a run (a log, checkpoints or a result), but its config.yaml"
                " is gone: restore it (a checkpoint's manifest.json holds it), or choose another"
                " `name`"
            )
        if not is_run_dir and self.path.exists() and any(self.path.iterdir()):
            raise RunDirError(f"{self} is not empty and holds no run: choose another `name`")
        if overwrite or not (self.holds_run and self.is_started):
            self._refuse_foreign_files()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lease = Lease(self.lease, say)
        lease.acquire()
        try:
            self._prepare(cfg, overwrite, say)
        except BaseException:
            lease.release()
            raise
        self._lease = lease

    def release(self) -> None:
        """Release the directory for other processes."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def check_lease(self) -> None:
        """Check that this process still holds the directory.

        Raises:
            LeaseError: If another process has taken it over.
        """
        if self._lease is not None:
            self._lease.check()

    def read_result(self, keys: tuple[str, ...]) -> dict:
        """Read `result.json` of a finished run.

        Args:
            keys: Keys that it must have.

        Raises:
            RunDirError: If the run has not finished.
            DamagedError: If the file has not these keys.
        """
        if not self.is_finished:
            raise RunDirError(f"{self} has no result.json: training is unfinished")
        return printable(read_json(self.result, keys))

    def record_failure(self, error: Exception, is_main: bool = True) -> None:
        """Write failure.json with the reason of a stop, for `fprnn status`.

        Rank 0 writes it, unless a rank with a DivergedAlone error was first. `claim` deletes it.
        """
        if isinstance(error, LeaseError) or self.failure.exists():
            return
        if is_main or isinstance(error, DivergedOnOneRank):
            masked = mask_credentials(describe_user_error(error) or repr(error))
            with contextlib.suppress(Exception):  # the disk may be what failed
                write_json(self.failure, {"sentence": masked, "exit_code": exit_status(error)})

    def _prepare(self, cfg: Run, overwrite: bool, say: Callable[[str], None]) -> None:
        """Check the run to continue, or delete a run that is overwritten."""
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
        self.save_config(cfg)

    def _refuse_lost_checkpoints(self) -> None:
        """Refuse a run whose checkpoints were deleted: it would overwrite its log from step 1.

        Raises:
            RunDirError: If the run has saved checkpoints, but they are gone.
        """
        paths = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        if any(not path.name.endswith(".partial") for path in paths):
            return
        records = read_metrics(self.path)
        if self.is_finished or any("checkpoint" in record for record in records):
            last = max((record["step"] for record in records), default=None)
            raise RunDirError(
                f"{self} has {'finished' if last is None else f'made {last} updates'}, but its"
                f" checkpoints are gone from {self.checkpoints.name}/: restore them, or train from"
                " scratch with --overwrite"
            )

    def save_config(self, cfg: Run) -> None:
        """Write config.yaml, after all checks that could refuse the config."""
        with writing(self.checkpoints):
            self.checkpoints.mkdir(exist_ok=True)
        write_text(self.config, cfg.to_yaml())

    def _refuse_foreign_files(self) -> None:
        """Refuse a directory with files that no training writes there.

        Raises:
            RunDirError: If there are such files.
        """
        if self.holds_run and not self._has_written_config():
            raise RunDirError(
                f"{self.config} was not written by a training, and the directory has no other file"
                " of a run: choose another `name`, or move it away"
            )
        if names := describe_foreign_files(self.path, make_run_file_test(self.path)):
            raise RunDirError(
                f"{self} holds files that no training wrote there ({names}), and a new run would"
                " delete them: move them away, or choose another `name`"
            )

    def _has_written_config(self) -> bool:
        """Return whether a training wrote config.yaml: it has every key and no comment."""
        if any(self.checkpoints.glob("step-*/manifest.json")):
            return True
        try:
            tree = load_tree(self.config)
        except ConfigError:
            return False
        lines = self.config.read_text(encoding="utf-8").splitlines()
        return tree.keys() >= WRITTEN_KEYS and not any(line.startswith("#") for line in lines)

    def _clear(self) -> None:
        """Delete the run's files except the lease.

        config.yaml is deleted last, so that an interrupted deletion leaves a run directory.
        """
        is_run_file = make_run_file_test(self.path)
        lease = self.lease.name
        delete_files(
            self.path, lambda name: name != lease and is_run_file(name), (self.config.name,)
        )


def flatten_config(cfg: Run) -> dict:
    """Return {dotted key: value} of a config, with each "auto" of model and solver replaced."""
    tree = cfg.model_dump(mode="json")
    model = resolve_mixer_settings(tree["model"], cfg.solver.iterates)
    return _flat({**tree, "model": model, "solver": cfg.solver.settled()})


def find_config_changes(was: Run, now: Run) -> dict[Resume, dict[str, str]]:
    """Return the keys that two configurations set differently, by the rule for resumed runs.

    Returns:
        {rule: {dotted key: "KEY was 1, is 2"}}, without solver keys for a model without a solver.
    """
    old, new = flatten_config(was), flatten_config(now)
    changes: dict[Resume, dict[str, str]] = {rule: {} for rule in Resume}
    for key in sorted(old.keys() | new.keys()):
        old_value, new_value = old.get(key), new.get(key)
        has_effect = not key.startswith("solver.") or now.model.name == "fprnn"
        if old_value != new_value and has_effect:
            rule = resume_rule(type(now), key)
            changes[rule][key] = f"{key} was {old_value!r}, is {new_value!r}"
    return changes


def check_checkpoint_config(path: Path, manifest: dict, run: RunDir, cfg: Run) -> None:
    """Refuse a config that differs from a checkpoint's in keys that must not change.

    Paths of files may differ, and the files of the tokenizer are compared elsewhere.

    Args:
        path: Folder of the checkpoint.
        manifest: Its manifest, with the config of the training except in version 0.1.
        run: The run of the checkpoint.
        cfg: The run's config now.

    Raises:
        RunDirError: If such keys differ; the message names each.
    """
    if "config" not in manifest:
        return
    was = build(manifest["config"], f"{path}/manifest.json: config", type(cfg), trained=True)
    changed = [
        text
        for key, text in find_config_changes(was, cfg)[Resume.FIXED].items()
        if not key.startswith("tokenizer.") and not key.endswith("path")
    ]
    if changed:
        raise RunDirError(
            f"{run.config} differs from the config of {path} ({'; '.join(changed)}): restore it"
            " (the checkpoint's manifest.json holds it)"
        )


def resolve_mixer_settings(model: dict, iterates: bool) -> dict:
    """Return a model section with each "auto" of the mixer replaced.

    Sections that describe the same model are equal then, also if an old version wrote one of them.

    Args:
        model: Section `model` of a config.
        iterates: True if the solver iterates the paper's map (`Solver.iterates`).
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
        is_section = isinstance(value, dict)
        flat.update(_flat(value, f"{prefix}{key}.") if is_section else {prefix + key: value})
    return flat


def _check_continued(cfg: Run, saved: Path, say: Callable[[str], None]) -> None:
    """Refuse changed keys that a resumed run must not change, and print other changes.

    Args:
        cfg: Config to continue with.
        saved: config.yaml that the run was trained with.
        say: Prints a sentence.

    Raises:
        RunDirError: If the run has another config.
    """
    # The schema fills in keys that are newer than the run.
    was = build(load_tree(saved), str(saved), type(cfg))
    changed = find_config_changes(was, cfg)
    if changed[Resume.FIXED]:
        raise RunDirError(
            f"{saved.parent} holds a run of another config"
            f" ({'; '.join(changed[Resume.FIXED].values())}): choose another `name`, or delete it"
            " with --overwrite"
        )
    if noted := changed[Resume.NOTED]:
        say(f"note: {'; '.join(noted.values())}: training continues with the new values")
    if (steps := cfg.train.steps) != was.train.steps:
        say(f"note: train.steps was {was.train.steps}, is {steps}: the schedule ends at {steps}")
