"""Run directories: file names, claiming one for writing, comparing configs on resuming."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lm.common.console import say
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

# Keys of every config.yaml that fprnn writes; a file written by hand rarely has all of them.
ALWAYS_WRITTEN_KEYS = {"name", "out_dir", "seed", "model", "train", "log", "sweep"}


class RunDirError(UserError, RuntimeError):
    """A run directory that cannot be used. The message gives the reason."""


def _file_property(name: str) -> property:
    """Return a property for the path of a file or folder in the run directory."""
    return property(lambda self: self.path / name)


class RunDir:
    """The directory of a run."""

    # Files and folders.
    config = _file_property(RUN_FILE)  # config of the training, with all defaults
    tokenizer = _file_property("tokenizer")  # folder in HuggingFace's format
    data = _file_property("data")  # the prepared corpus
    checkpoints = _file_property("checkpoints")  # lm/runs/checkpoint.py
    metrics = _file_property("metrics.jsonl")
    result = _file_property("result.json")  # final results
    failure = _file_property("failure.json")  # reason of a stop or failure
    environment = _file_property("environment.json")  # versions and devices
    deepspeed = _file_property("deepspeed.json")  # DeepSpeed's configuration
    init_from = _file_property("init_from.json")  # source of the initial weights
    lease = _file_property("lease.json")  # names the process that writes here
    stacks = _file_property("stacks")  # stack traces of a run that hangs
    profile = _file_property("profile")  # profiles by `log.profile`
    wandb_id = _file_property("wandb_id")
    tensorboard = _file_property("tensorboard")
    export = _file_property("hf")  # the folder that the demo exports to
    figures = _file_property("figures")
    summary = _file_property("summary.json")  # written by `fprnn report`
    evaluation = _file_property("eval.json")  # written by `fprnn synthetic eval`

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

    @property
    def can_be_continued(self) -> bool:
        """True if the directory has a config.yaml and a trace of an update."""
        return self.holds_run and self.is_started

    def claim(self, cfg: Run, overwrite: bool) -> None:
        """Claim the directory until `release`, for a new run or to continue the run in it.

        A run without an update (its start failed) is replaced. Only files that fprnn wrote are
        deleted: a directory with other files is refused. If a run is continued, its config.yaml
        stays unchanged until `save_config`.

        Args:
            cfg: Config of the run. `lm.config.resuming` defines which keys may differ from the
                config of a run that is continued.
            overwrite: Delete the run in the directory.

        Raises:
            RunDirError: If the directory holds a run and neither `resume` nor `overwrite` is set; a
                run with another config; a run without its config or its checkpoints; or files that
                fprnn did not write.
            LeaseError: If another process writes there.
            OutputError: If the directory cannot be written.
        """
        check_folder(self.path)
        has_lease = self.lease.exists()
        has_lost_config = self.is_started and not self.holds_run
        # The lease proves that fprnn used the directory, so that `overwrite` may delete the run.
        if has_lost_config and not (has_lease and overwrite):
            raise RunDirError(
                f"{self} holds files of a run (a log, checkpoints or a result), but its config.yaml"
                " is gone: restore it (a checkpoint's manifest.json holds it), or choose another"
                " `name`"
            )
        is_run_dir = self.holds_run or has_lease  # a run killed at its start has only a lease
        if not is_run_dir and self.path.exists() and any(self.path.iterdir()):
            raise RunDirError(f"{self} is not empty and holds no run: choose another `name`")
        if overwrite or not self.can_be_continued:
            self._refuse_foreign_files()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lease = Lease(self.lease)
        lease.acquire()
        try:
            self._prepare_folder(cfg, overwrite)
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
            DamagedError: If the file cannot be read or lacks a key.
        """
        return printable(read_json(self.result, keys))

    def record_failure(self, error: Exception, is_main: bool = True) -> None:
        """Write failure.json with the reason of a stop, for `fprnn status`.

        Rank 0 writes it, or the rank that raised DivergedOnOneRank. The first error of a run is
        kept; `claim` deletes the file.

        Args:
            error: Error that ends the run.
            is_main: True on rank 0.
        """
        # After a LeaseError the directory belongs to another process.
        if isinstance(error, LeaseError) or self.failure.exists():
            return
        if is_main or isinstance(error, DivergedOnOneRank):
            sentence = mask_credentials(describe_user_error(error) or repr(error))
            with contextlib.suppress(Exception):  # the disk itself may have failed
                write_json(self.failure, {"sentence": sentence, "exit_code": exit_status(error)})

    def _prepare_folder(self, cfg: Run, overwrite: bool) -> None:
        """Check the run to continue; otherwise delete an old run and write config.yaml."""
        if self.can_be_continued and not overwrite:
            if cfg.resume == "never":
                raise RunDirError(
                    f"{self} already holds a run: continue it with resume=auto, choose another"
                    " `name`, or delete it with --overwrite"
                )
            _check_resumed_config(cfg, self.config)
            if cfg.resume == "auto":
                self._refuse_lost_checkpoints()
            self.failure.unlink(missing_ok=True)
            return
        if self.holds_run or self.is_started:
            self._clear()
        self.failure.unlink(missing_ok=True)
        self.save_config(cfg)

    def _refuse_lost_checkpoints(self) -> None:
        """Refuse a run whose checkpoints were deleted: it would overwrite its log from step 1."""
        paths = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        if any(not path.name.endswith(".partial") for path in paths):
            return
        records = read_metrics(self.path)
        if self.is_finished or any("checkpoint" in record for record in records):
            last_step = max((record["step"] for record in records), default=None)
            progress = "finished" if last_step is None else f"made {last_step} updates"
            raise RunDirError(
                f"{self} has {progress}, but its checkpoints are gone from"
                f" {self.checkpoints.name}/: restore them, or train from scratch with --overwrite"
            )

    def save_config(self, cfg: Run) -> None:
        """Write config.yaml, after all checks that could refuse the config."""
        with writing(self.checkpoints):
            self.checkpoints.mkdir(exist_ok=True)
        write_text(self.config, cfg.to_yaml())

    def _refuse_foreign_files(self) -> None:
        """Raise RunDirError if the directory has files that fprnn did not write."""
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
        has_comment = any(line.startswith("#") for line in lines)
        return tree.keys() >= ALWAYS_WRITTEN_KEYS and not has_comment

    def _clear(self) -> None:
        """Delete the run's files except the lease.

        config.yaml is deleted last, so that an interrupted deletion leaves a run directory.
        """
        is_run_file = make_run_file_test(self.path)
        lease_name = self.lease.name
        delete_files(
            self.path,
            lambda name: name != lease_name and is_run_file(name),
            last_names=(self.config.name,),
        )


def flatten_config(cfg: Run) -> dict:
    """Return {dotted key: value} of a config, with each "auto" of model and solver replaced."""
    tree = cfg.model_dump(mode="json")
    model = resolve_mixer_settings(tree["model"], cfg.solver.iterates)
    return _flatten({**tree, "model": model, "solver": cfg.solver.resolve_auto()})


def find_config_changes(old_cfg: Run, new_cfg: Run) -> dict[Resume, dict[str, str]]:
    """Return the keys that two configs set differently, by the rule for resumed runs.

    Returns:
        {rule: {dotted key: "KEY was 1, is 2"}}, without solver keys for a model without a solver.
    """
    old, new = flatten_config(old_cfg), flatten_config(new_cfg)
    changes: dict[Resume, dict[str, str]] = {rule: {} for rule in Resume}
    for key in sorted(old.keys() | new.keys()):
        old_value, new_value = old.get(key), new.get(key)
        has_effect = not key.startswith("solver.") or new_cfg.model.name == "fprnn"
        if old_value != new_value and has_effect:
            rule = resume_rule(type(new_cfg), key)
            changes[rule][key] = f"{key} was {old_value!r}, is {new_value!r}"
    return changes


def check_checkpoint_config(path: Path, manifest: dict, run: RunDir, cfg: Run) -> None:
    """Refuse a config that differs from a checkpoint's in keys that a resumed run must not change.

    Paths of files may differ. `lm/training/resume.py` compares the files of the tokenizer.

    Args:
        path: Folder of the checkpoint.
        manifest: The checkpoint's manifest, with the config of the training except in version 0.1.
        run: The run of the checkpoint.
        cfg: Current config of the run.

    Raises:
        RunDirError: If such keys differ; the message names each.
    """
    if "config" not in manifest:
        return
    source = f"{path}/manifest.json: config"
    old_cfg = build(manifest["config"], source, type(cfg), trained=True)
    changes = [
        change
        for key, change in find_config_changes(old_cfg, cfg)[Resume.FIXED].items()
        if not key.startswith("tokenizer.") and not key.endswith("path")
    ]
    if changes:
        raise RunDirError(
            f"{run.config} differs from the config of {path} ({'; '.join(changes)}): restore it"
            " (the checkpoint's manifest.json holds it)"
        )


def resolve_mixer_settings(model: dict, iterates: bool) -> dict:
    """Return a config's section `model` with each "auto" of the mixer replaced.

    Two sections that describe the same model are then equal, even if an old version wrote one.

    Args:
        model: The section.
        iterates: True if the solver iterates the paper's map (`Solver.iterates`).
    """
    from lm.model.configuration_fprnn import resolve_gate_init_bias, resolve_mixer_bounds

    block, mixer = model.get("block", "fp_mamba1"), model.get("mixer", "householder")
    kronecker_norm, contractive = resolve_mixer_bounds(
        block, mixer, model.get("kronecker_norm", "auto"), model.get("contractive", "auto")
    )
    gate_init_bias = model.get("mixer_gate_init_bias", "auto")
    return model | {
        "kronecker_norm": kronecker_norm,
        "contractive": contractive,
        "mixer_gate_init_bias": resolve_gate_init_bias(block, mixer, iterates, gate_init_bias),
    }


def _flatten(tree: dict, prefix: str = "") -> dict:
    """Return {dotted key: value} of nested dicts."""
    flat = {}
    for key, value in tree.items():
        is_section = isinstance(value, dict)
        flat.update(_flatten(value, f"{prefix}{key}.") if is_section else {prefix + key: value})
    return flat


def _check_resumed_config(cfg: Run, old_path: Path) -> None:
    """Compare with the config in `old_path`: refuse forbidden changes, and print other changes."""
    # The schema fills in keys that are newer than the run.
    old_cfg = build(load_tree(old_path), str(old_path), type(cfg))
    changes = find_config_changes(old_cfg, cfg)
    if forbidden_changes := changes[Resume.FIXED]:
        raise RunDirError(
            f"{old_path.parent} holds a run of another config"
            f" ({'; '.join(forbidden_changes.values())}): choose another `name`, or delete it"
            " with --overwrite"
        )
    if noted_changes := changes[Resume.NOTED]:
        say(f"note: {'; '.join(noted_changes.values())}: training continues with the new values")
    old_steps, steps = old_cfg.train.steps, cfg.train.steps
    if steps != old_steps:
        say(f"note: train.steps was {old_steps}, is {steps}: the schedule ends at {steps}")
