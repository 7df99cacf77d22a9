"""Checks of the paths of runs and models before PyTorch is imported.

Importing PyTorch, transformers and DeepSpeed takes several seconds. The error about a mistyped path
should appear at once, so nothing slow is imported here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lm.common.errors import BAD_CONFIG, UserError

RUN_FILE = "config.yaml"  # in every run directory
MODEL_FILE = "config.json"  # in every export, and in every folder that `save_pretrained` writes
HUB_TIMEOUT_S = 5.0  # limit for connecting to the hub, and again for its answer


class PathError(UserError, RuntimeError):
    """A path that is not the run, model or file that a command needs. The message names it."""

    exit_status = BAD_CONFIG


def check_run(path: Path | str) -> None:
    """Refuse a path that is not a run directory.

    Raises:
        PathError: If the folder does not exist, or holds no run.
    """
    folder = Path(path)
    if not folder.exists():
        raise PathError(f"{path}: no such folder; give a run directory{_suggest_similar(folder)}")
    if not (folder / RUN_FILE).is_file():
        raise PathError(f"{path} holds no run (it has no {RUN_FILE}){_suggest_run(folder)}")


def check_resume(resume: str) -> None:
    """Refuse a value of `resume` that is neither never, auto nor an existing folder.

    Raises:
        PathError: If it is none of these.
    """
    if resume not in ("never", "auto") and not Path(resume).is_dir():
        raise PathError(
            f"`resume` is {resume!r}: it must be never, auto or an existing folder of a checkpoint"
            " (RUN/checkpoints/step-NNNNNN)"
        )


def check_folder(option: str, path: str | Path | None) -> None:
    """Raise PathError if an option names a folder that does not exist; None: it is not set."""
    if path is not None and not Path(path).is_dir():
        raise PathError(f"{option} {path}: no such folder")


def check_model(path: Path | str, allow_hub: bool = True) -> Literal["run", "export", "hub"]:
    """Refuse a path that is no language model, and return its kind.

    Args:
        path: A run directory, a folder for `from_pretrained`, or a name on the hub.
        allow_hub: Accept a name on the hub, after one request to it.

    Returns:
        "run" for a run directory, "export" for a folder for `from_pretrained`, or "hub".

    Raises:
        PathError: If the path is none of these.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        raise PathError(f"{path} is a file: give the run directory or the exported folder")
    if (folder / MODEL_FILE).is_file():
        return "export"
    if (folder / RUN_FILE).is_file():
        return "run"
    if folder.is_dir():
        raise PathError(
            f"{path} holds neither a run ({RUN_FILE}) nor an export ({MODEL_FILE})"
            f"{_suggest_run(folder)}"
        )
    if looks_local(path) or not allow_hub:
        raise PathError(
            f"{path}: no such folder; give a run or an export{_suggest_similar(folder)}"
        )
    _check_on_hub(str(path))
    return "hub"


def looks_local(name: Path | str) -> bool:
    """Return whether the name of a missing folder is a path, not a name on the hub.

    A name on the hub is OWNER/NAME. If a folder `runs` exists, then `runs/nope` is a mistyped path.
    """
    text = str(name)
    return text.count("/") != 1 or text[0] in "/.~" or Path(text).parent.is_dir()


def _check_on_hub(name: str) -> None:
    """Check that a model is in the local cache or on the hub; raise PathError if it is not.

    The loaders of transformers would retry for more than a minute.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError

    try:
        if not isinstance(try_to_load_from_cache(name, MODEL_FILE), str):
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        return  # the loader's message explains how to get access
    except Exception as e:  # errors of huggingface_hub and httpx
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise PathError(f"{name}: no such folder, and not a model on the hub: {reason}") from None


def _list_runs(folder: Path) -> Sequence[Path]:
    """Return the run directories directly in a folder, sorted."""
    if not folder.is_dir():
        return ()
    return sorted(p for p in folder.iterdir() if (p / RUN_FILE).is_file())


def _suggest_run(folder: Path) -> str:
    """Return the end of an error message: a run that the user may have meant, or ""."""
    if runs := _list_runs(folder):
        return f"; it contains runs, such as {runs[0]}"
    return _suggest_similar(folder)


def _suggest_similar(folder: Path) -> str:
    """Return the end of an error message: the folder with the most similar name, or ""."""
    if folder.exists() or not folder.parent.is_dir():
        return ""
    names = [p.name for p in folder.parent.iterdir() if p.is_dir()]
    matches = difflib.get_close_matches(folder.name, names, n=1, cutoff=0.6)
    return f"; did you mean {folder.parent / matches[0]}?" if matches else ""
