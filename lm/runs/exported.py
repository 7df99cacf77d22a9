"""Loading of an export's model and tokenizer. Missing weights are refused, not initialised."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.errors import UserError, describe_refused_pickle, require
from lm.model.checksums import refuse_changed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_NAMES = 3  # names of weights in a message


class LoadError(UserError, RuntimeError):
    """A model or tokenizer that cannot be loaded as it was saved. The message names the problem."""


def load_model(path: Path | str, trust: bool = False) -> PreTrainedModel:
    """Load the causal language model of an export, or of a name on the hub, on the CPU.

    Exports of built-in models are loaded with the classes of this package; the code in the folder
    is not run. transformers itself would initialise missing weights with random values.

    Args:
        path: The folder, or the name on the hub.
        trust: Run the code in the folder if its model is not built in (a user's mixer). Code from
            the hub is never run.

    Raises:
        LoadError: If the model needs the code in the folder and `trust` is False; if files are
            unreadable, damaged or changed; if a weight is missing, unknown to the model, of another
            shape or not finite.
    """
    require("torch", "a model")
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from lm.runs.auto_classes import register_auto_classes

    register_auto_classes()
    _refuse_changed(path)
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # LoadError replaces transformers' report on the weights
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            trust_remote_code=trust and _is_local(path),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except SafetensorError as e:
        raise LoadError(
            f"the weights in {path} are cut short or damaged ({e}): export the run again"
        ) from None
    except pickle.UnpicklingError as e:
        files = sorted(Path(path).glob("pytorch_model*.bin"))
        raise LoadError(describe_refused_pickle(files[0] if files else path, e)) from None
    # ValueError for an unknown model type; other errors for a config.json without a valid model.
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as e:
        raise _code_error(e, path) or LoadError(f"cannot load {path}: {_reason(e)}") from None
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
    _refuse_wrong_weights(path, model, info)
    return model


def load_tokenizer(path: Path | str, trust: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an export, or of a name on the hub.

    Args:
        path: The folder, or the name on the hub.
        trust: Run the tokenizer's code in the folder.

    Raises:
        LoadError: If it is missing or damaged, or needs code and `trust` is False.
    """
    from transformers import AutoTokenizer

    from lm.runs.auto_classes import register_auto_classes

    register_auto_classes()  # AutoTokenizer reads the model type in config.json
    _refuse_changed(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust and _is_local(path))
        tokenizer("a")  # fails on some errors in the files that loading does not find
        return tokenizer
    except ImportError:  # a missing package; the command line explains it
        raise
    except Exception as e:  # the loaders raise errors of many classes, also bare Exception
        reason = f"cannot load the tokenizer of {path}: {_reason(e)}"
        raise _code_error(e, path) or LoadError(reason) from None


def _refuse_wrong_weights(path: Path | str, model: PreTrainedModel, info: dict) -> None:
    """Refuse weights that are missing, unknown, of another shape or not finite."""
    names_by_problem = {
        "missing": info["missing_keys"],
        "unknown to the model": info["unexpected_keys"],
        "of another shape than config.json says": [
            f"{name} {list(saved)}, not {list(expected)}"
            for name, saved, expected in info["mismatched_keys"]
        ],
        "NaN or infinite": [
            name for name, weight in model.named_parameters() if not weight.isfinite().all()
        ],
    }
    problems = []
    for problem, names in names_by_problem.items():
        if names:
            weights = "1 weight" if len(names) == 1 else f"{len(names)} weights"
            problems.append(f"{weights} {problem} ({format_first_names(names)})")
    if problems:
        raise LoadError(
            f"{path} is damaged, its weights do not fit its config.json: {'; '.join(problems)};"
            " export the run again"
        )


def _code_error(error: Exception, path: Path | str) -> LoadError | None:
    """Return the LoadError if transformers refused to run the folder's code, or None."""
    if not isinstance(error, ValueError) or "trust_remote_code" not in str(error):
        return None
    if not _is_local(path):
        return LoadError(f"{path} needs code of its own, and code from the hub is never run")
    files = [file.name for file in Path(path).glob("*.py")]
    names = format_first_names(files) or "named in its JSON files"
    return LoadError(
        f"{path} needs code of its own ({names}), which has not been checked: --trust (in Python"
        " trust=True) runs it; use it only if you know the author"
    )


def _refuse_changed(path: Path | str) -> None:
    """Refuse an export whose files differ from its SHA256SUMS."""
    try:
        if _is_local(path):
            refuse_changed(path)
    except (OSError, ValueError) as e:
        raise LoadError(str(e)) from None


def _is_local(path: Path | str) -> bool:
    """Return whether this is a local folder, not a name on the hub."""
    return Path(path).is_dir()


def _reason(error: Exception) -> str:
    """Return the first line of a loader's error, after its class unless it is a sentence.

    OSError and ValueError have sentences; the text of a KeyError, for example, is only the key.
    """
    lines = str(error).strip().splitlines() or ["no reason given"]
    if isinstance(error, OSError | ValueError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}"


def format_first_names(names: Iterable[str]) -> str:
    """Return the first MAX_NAMES sorted names for a message."""
    names = sorted(names)
    return ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
