"""Model and tokenizer of an exported directory, whole or refused, where transformers makes up."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.errors import UserError, describe_refused_pickle, require
from lm.model.checksums import refuse_changed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHOWN = 3  # names of weights that a message gives


class LoadError(UserError, RuntimeError):
    """A model that cannot be loaded as it was saved; the message says what is wrong with it."""


def load_model(path: Path | str, trust: bool = False) -> PreTrainedModel:
    """The causal language model of an exported directory, or of a name on the hub, on the CPU.

    An export of a built-in model is read with the classes of this package, and the code beside it
    is not run.

    Args:
        trust: run the code that a directory brings along where its model is none of ours (a user's
            mixer); that of a name on the hub never is.
    Raises:
        LoadError: it brings code along, and is not trusted; unreadable or damaged files, or others
            than were exported; a weight that is missing, unknown to the model, of another shape,
            or not finite. transformers itself would go on with random values.
    """
    require("torch", "a model")
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from lm.runs.auto_classes import register_auto_classes

    register_auto_classes()
    _refuse_changed(path)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # its report on the weights is replaced by our sentence
    logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            trust_remote_code=trust and _is_here(path),
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
    # ValueError: a model that nobody knows; the others: a config.json that no model can have.
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as e:
        raise _foreign_code(e, path) or LoadError(f"cannot load {path}: {_reason(e)}") from None
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    kinds = {
        "missing": found["missing_keys"],
        "unknown to the model": found["unexpected_keys"],
        "of another shape than config.json says": [
            f"{name} {list(saved)}, not {list(ours)}"
            for name, saved, ours in found["mismatched_keys"]
        ],
        "NaN or infinite": [n for n, p in model.named_parameters() if not p.isfinite().all()],
    }
    wrong = [
        f"{len(names)} weight{'s' * (len(names) > 1)} {kind} ({first_names(names)})"
        for kind, names in kinds.items()
        if names
    ]
    if wrong:
        raise LoadError(
            f"{path} is damaged, its weights are not those of its config.json: {'; '.join(wrong)};"
            " export the run again"
        )
    return model


def load_tokenizer(path: Path | str, trust: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of an exported directory, or of a name on the hub.

    Args:
        trust: run the code that a directory brings along for it.
    Raises:
        LoadError: it is not there, damaged, or brings code along and is not trusted.
    """
    from transformers import AutoTokenizer

    from lm.runs.auto_classes import register_auto_classes

    register_auto_classes()  # AutoTokenizer reads the model type in config.json
    _refuse_changed(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust and _is_here(path))
        tokenizer("a")  # some of what its files say is looked at only here
        return tokenizer
    except ImportError:  # a package is missing, which has a sentence of its own
        raise
    except Exception as e:  # the loaders raise whatever they meet, bare Exception included
        reason = f"cannot load the tokenizer of {path}: {_reason(e)}"
        raise _foreign_code(e, path) or LoadError(reason) from None


def _foreign_code(error: Exception, path: Path | str) -> LoadError | None:
    """What to say where transformers would have to run code of a checkpoint; None elsewhere."""
    if not isinstance(error, ValueError) or "trust_remote_code" not in str(error):
        return None
    if not _is_here(path):
        return LoadError(f"{path} runs code of its own, and code from the hub is never run here")
    files = [file.name for file in Path(path).glob("*.py")]
    shown = first_names(files) or "named in its JSON files"
    return LoadError(
        f"{path} runs code of its own ({shown}), which nothing here"
        " has checked: --trust (in Python trust=True) runs it, once you know whose it is"
    )


def _refuse_changed(path: Path | str) -> None:
    """Raises LoadError where a file of an export is not what its SHA256SUMS says."""
    try:
        if _is_here(path):
            refuse_changed(path)
    except (OSError, ValueError) as e:
        raise LoadError(str(e)) from None


def _is_here(path: Path | str) -> bool:
    """Whether this is a folder that somebody chose, not a name whose files come from elsewhere."""
    return Path(path).is_dir()


def _reason(error: Exception) -> str:
    """The first line of what a loader says; where that may be a bare key, with the error's name."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    if isinstance(error, OSError | ValueError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}"


def first_names(names: Iterable[str]) -> str:
    """Return the first of sorted names, for a message."""
    names = sorted(names)
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
