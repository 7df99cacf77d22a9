"""Checks of the paths of runs and models before PyTorch is imported.

Importing PyTorch, transformers and DeepSpeed takes several seconds, too long for the error of a
mistyped path. Nothing slow is imported here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from lm.common.errors import BAD_CONFIG, UserError

RUN_FILE = "config.yaml"  # every run directory has it
MODEL_FILE = "config.json"  # every export, and every folder that `save_pretrained` writes, has it
HUB_TIMEOUT_S = 5.0  # to connect to the hub, and again for its answer


class PlaceError(UserError, RuntimeError):
    """A path that is not the run, model or file that a command needs. The message names it."""

    exit_status = BAD_CONFIG


def check_run(path: Path | str) -> None:
    """Refuse a path that is no run directory.

    Raises:
        PlaceError: If there is no such folder, or no run in it.
    """
    folder = Path(path)
    if not folder.exists():
        raise PlaceError(f"{path}: no such folder; give a run directory{_near(folder)}")
    if not (folder / RUN_FILE).is_file():
        raise PlaceError(f"{path} holds no run (it has no {RUN_FILE}){_hint(folder)}")


def check_resume(resume: str) -> None:
    """Refuse a `resume` that is neither never, auto nor the folder of a checkpoint.

    Raises:
        PlaceError: If there is no such folder.
    """
    if resume not in ("never", "auto") and not Path(resume).is_dir():
        raise PlaceError(
            f"`resume` is {resume!r}: it must be never, auto or an existing folder of a checkpoint"
            " (RUN/checkpoints/step-NNNNNN)"
        )


def check_files(options: Mapping[str, str | Path | None]) -> None:
    """Refuse options that name a missing file.

    Args:
        options: {option on the command line: its path, or None if it is not set}.

    Raises:
        PlaceError: If a path is no file.
    """
    for name, path in options.items():
        if path is not None and not Path(path).exists():
            raise PlaceError(f"{name} {path}: no such file")
        if path is not None and Path(path).is_dir():
            raise PlaceError(f"{name} {path} is a folder: name a file in it")


def check_folders(options: Mapping[str, str | Path | None]) -> None:
    """Refuse options that name a missing folder; arguments as `check_files`."""
    for name, path in options.items():
        if path is not None and not Path(path).is_dir():
            raise PlaceError(f"{name} {path}: no such folder")


def check_model(path: Path | str, on_hub: bool = True) -> Literal["run", "export", "hub"]:
    """Refuse a path that is no language model, and return its kind.

    Args:
        path: A run directory, a folder for `from_pretrained`, or a name on the hub.
        on_hub: Allow a name on the hub.

    Raises:
        PlaceError: If it is none of these. The hub is asked once, for `HUB_TIMEOUT_S`.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        raise PlaceError(f"{path} is a file: give the run directory or the exported folder")
    if (folder / MODEL_FILE).is_file():
        return "export"
    if (folder / RUN_FILE).is_file():
        return "run"
    if folder.is_dir():
        raise PlaceError(
            f"{path} holds neither a run ({RUN_FILE}) nor an export ({MODEL_FILE}){_hint(folder)}"
        )
    if looks_local(path) or not on_hub:
        raise PlaceError(f"{path}: no such folder; give a run or an export{_near(folder)}")
    _check_on_hub(str(path))
    return "hub"


def looks_local(name: Path | str) -> bool:
    """Return whether the name of a missing folder is a path, not a name on the hub.

    A name on the hub is OWNER/NAME. `runs/nope` next to a folder `runs` is a mistyped path.
    """
    text = str(name)
    return text.count("/") != 1 or text[0] in "/.~" or Path(text).parent.is_dir()


def _check_on_hub(name: str) -> None:
    """Refuse a name that the hub does not have, or if the hub does not respond.

    The loaders of transformers would retry for more than a minute.

    Raises:
        PlaceError: If the name is invalid, the hub does not have it, or the hub does not respond
            and there is no local copy.
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
        raise PlaceError(f"{name}: no such folder, and not a model on the hub: {reason}") from None


def _runs_below(folder: Path) -> Sequence[Path]:
    """Return the run directories right below a folder, sorted."""
    if not folder.is_dir():
        return ()
    return sorted(p for p in folder.iterdir() if (p / RUN_FILE).is_file())


def _hint(folder: Path) -> str:
    """Return a hint at the run that may be meant instead of a folder without a run, or ""."""
    if below := _runs_below(folder):
        return f"; it contains runs, such as {below[0]}"
    return _near(folder)


def _near(folder: Path) -> str:
    """Return a hint at the folder with the most similar name, or ""."""
    if folder.exists() or not folder.parent.is_dir():
        return ""
    names = [p.name for p in folder.parent.iterdir() if p.is_dir()]
    matches = difflib.get_close_matches(folder.name, names, 1, 0.6)
    return f"; did you mean {folder.parent / matches[0]}?" if matches else ""
