"""Sampling from an exported checkpoint, and how its fixed points are solved."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.errors import UserError
from lm.runs.exported import load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COLDEST = 1e-3  # below, logits divided by it may be infinite
PAPER = "paper"  # a name for schedule `parallel` with stopping `paper`


class GenerationError(UserError, RuntimeError):
    """Text that cannot be generated; the message says why."""


def load_exported(
    path: Path | str, trust: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load (model, tokenizer) of an exported directory or a hub name, on a GPU if there is one.

    Args:
        path: An exported folder or a name on the hub that `places.find_model` has found.
        trust: Run the code that a directory brings along where it has a mixer of its own.

    Raises:
        GenerationError: The folder holds no tokenizer.
        LoadError: It is damaged, or not trusted.
    """
    import torch

    files = ("tokenizer.json", "tokenizer_config.json")
    if Path(path).is_dir() and not any((Path(path) / file).is_file() for file in files):
        raise GenerationError(f"{path} holds no tokenizer ({files[0]}): copy one there")
    model = load_model(path, trust)
    tokenizer = load_tokenizer(path, trust)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a text is continued.

    Attributes:
        max_new_tokens: at least 1. temperature: 0, which is greedy decoding, or from
        COLDEST on. top_k: only
        the likeliest so many tokens are drawn; 0: all. seed: at least 0.
        schedule, tol, max_iters: how a fixed-point model is solved, see `solving`; None: as it says
        itself.
    Raises:
        GenerationError: a number out of its range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    schedule: str | None = None
    tol: float | None = None
    max_iters: int | None = None

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise GenerationError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1")
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise GenerationError(
                f"temperature is {self.temperature:g}: it must be 0 (greedy) or a finite number"
                f" from {COLDEST:g} on"
            )
        if self.top_k < 0:
            raise GenerationError(
                f"top_k is {self.top_k}: it must be at least 1, or 0 for all tokens"
            )
        if not 0 <= self.seed < 2**64:
            raise GenerationError(f"seed is {self.seed}: it must be at least 0 and below 2^64")


@contextlib.contextmanager
def solving(
    model: PreTrainedModel,
    schedule: str | None = None,
    tol: float | None = None,
    max_iters: int | None = None,
) -> Iterator[None]:
    """Within the block `model` solves its fixed points so in evaluation; None leaves what the
    checkpoint says.

    Args:
        schedule: one of lm.model's schedules, with causal stopping and the checkpoint's `token`; or
            `paper`: the paper's procedure (its f iterated on all tokens, its stopping).
        tol: relative residual (eval_tol). max_iters: ℓmax (eval_max_iters). Neither is needed, or
            read, where each token is solved to rounding (`sequential` with token exact).
    Raises:
        GenerationError: the model has no solver, no such schedule (or not for this model), tol ≤ 0,
            or max_iters < 1.
    """
    from lm.model.configuration_fprnn import MODEL_TYPES
    from lm.model.fields import parse_schedule

    if (schedule, tol, max_iters) == (None, None, None):
        yield
        return
    if model.config.model_type not in MODEL_TYPES:
        raise GenerationError(
            f"the checkpoint is a {model.config.model_type} model: it has no fixed point to solve,"
            " so schedule, tol and max_iters are not for it"
        )
    if tol is not None and not 0 < tol < math.inf:
        raise GenerationError(f"tol is {tol:g}: it is a relative residual, above 0 (say 0.01)")
    if max_iters is not None and max_iters < 1:
        raise GenerationError(f"max_iters is {max_iters}: it counts iterations, at least 1")
    new: dict[str, str | float | None] = {"eval_tol": tol, "eval_max_iters": max_iters}
    if schedule == PAPER:
        new |= {"token": "iterate", "schedule": "parallel", "stopping": "paper"}
    elif schedule is not None:
        new |= {"schedule": schedule, "stopping": "causal"}
    new = {name: value for name, value in new.items() if value is not None}
    try:
        if schedule not in (None, PAPER):
            parse_schedule(schedule)
    except ValueError as e:
        raise GenerationError(f"{e}; {PAPER} (all tokens, with the paper's stopping)") from None
    with contextlib.ExitStack() as until_the_end:
        try:
            until_the_end.enter_context(model.solving(**new))
        except ValueError as e:
            raise GenerationError(str(e)) from None
        yield


def continued(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, sampling: Sampling
) -> str:
    """`generate` with a model that is loaded, in evaluation mode.

    Raises:
        GenerationError: the prompt is empty, or `solving` refuses.
    """
    import torch

    from lm.model.configuration_fprnn import MODEL_TYPES

    try:
        prompt.encode()
    except UnicodeEncodeError as e:  # bytes of a command line that are no UTF-8
        raise GenerationError(f"the prompt is no text: character {e.start} is not UTF-8") from None
    torch.manual_seed(sampling.seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise GenerationError("the prompt is empty: give at least one character")
    drawing: dict[str, bool | float] = {"do_sample": False}
    if sampling.temperature > 0:
        drawing = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
        }
    if model.config.model_type in MODEL_TYPES:  # whatever the checkpoint's generation config says
        drawing["use_cache"] = True
    with solving(model, sampling.schedule, sampling.tol, sampling.max_iters):
        ids = model.generate(
            **inputs,
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            **drawing,
        )
    return tokenizer.decode(ids[0], skip_special_tokens=True)
