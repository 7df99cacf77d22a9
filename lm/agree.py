"""How far the schedules of a checkpoint agree, and what perplexity a budget of iterations buys."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm
from lm.errors import UserError, require
from lm.evaluate import write_json
from lm.generate import PAPER, GenerationError, load_exported, set_solver
from lm.outputs import check_file, check_folder, writing

if TYPE_CHECKING:
    from rich.table import Table

SCHEDULES = (PAPER, "parallel", "window:4", "window:16", "auto", "sequential")
BUDGET_SCHEDULES = ("parallel", "auto", "sequential")
ITERATIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
TIGHT_TOL, TIGHT_MAX_ITERS = 1e-5, 1000
# What set_solver may change.
SETTINGS = ("schedule", "stopping", "eval_tol", "eval_max_iters")
# Progress is reported as (batches done, of how many, what was just finished or None).
Report = Callable[[int, int | None, str | None], None]
MEANING = {
    "tight": "the solution all are compared with: token by token (sequential), to its own tol",
    "difference": "‖h − h_tight‖∞ / ‖h_tight‖∞ of a token's last hidden state h (after the final"
    " norm): the largest and the mean over tokens",
    "top1": "share of the tokens whose most likely next token is that of the tight solution",
    "work": "evaluations of the iteration per token, all that were computed; mean over layers",
    "num_iters": "ℓ*: iterations until a sequence had converged; mean over layers and sequences",
    "unconverged": "share of the tokens (paper: of the sequences) not converged to tol",
    "seconds": "of the forward passes through the backbone, without the head",
}


class AgreementError(UserError, RuntimeError):
    """Solutions that cannot be compared; the message says why, and what would do."""


@contextlib.contextmanager
def solving(
    model, schedule: str | None = None, tol: float | None = None, max_iters: int | None = None
) -> Iterator[None]:
    """Within the block `model` is solved so (see lm.generate.set_solver); afterwards as before."""
    before = {name: getattr(model.config, name) for name in SETTINGS}
    try:
        set_solver(model, schedule, tol, max_iters)
        yield
    finally:
        for name, value in before.items():
            setattr(model.config, name, value)


def agree(
    checkpoint: Path | str,
    text: Path | str | None = None,
    *,
    schedules: Sequence[str] | None = None,
    tol: float | None = None,
    sequences: int = 8,
    length: int = 256,
    tight_tol: float = TIGHT_TOL,
    batch_size: int = 4,
    seed: int = 0,
    out: Path | None = None,
    progress: Report | None = None,
) -> dict:
    """Solve the same text under every schedule and compare with its tight solution.

    Args:
        checkpoint: an exported folder of a fixed-point model; computed in float32.
        text: a UTF-8 file; None: the held-out documents of the built-in corpus.
        schedules: by default SCHEDULES, and `exact` where the model has it.
        tol: relative residual; None: what the checkpoint evaluates with (`paper` has its own).
        sequences: how many of `length` tokens, drawn with `seed`; fewer if the text has fewer.
        batch_size: sequences solved at once; the paper's stopping depends on it.
        out: the JSON file, by default checkpoint/eval/agree.json.
    Returns:
        {"tight": {…}, "schedules": {name: {"difference": {"max", "mean"}, "top1", "perplexity",
        "perplexity_ratio", "work", "num_iters", "unconverged", "seconds", "seconds_ratio", "tol"}},
        "meaning": {…}, …}, as written; seconds_ratio (to `paper`) is None without that schedule.
    Raises:
        AgreementError: sizes below 1, tol ≤ 0, no such text, or one shorter than a sequence.
        GenerationError: no such export, one without a solver, or an unknown schedule.
        DataError: the text is not UTF-8, or empty. OutputError: `out` cannot be written.
    """
    _check(schedules, sequences, length, batch_size, seed, tol=tol, tight_tol=tight_tol)
    _check_checkpoint(checkpoint)
    path = Path(out) if out else Path(checkpoint) / "eval" / "agree.json"
    check_file(path)
    model, tokenizer = _load(checkpoint)
    names = _schedules(model, SCHEDULES if schedules is None else schedules)
    if schedules is None and _has(model, "exact"):
        names.append("exact")
    blocks = _blocks(model, tokenizer, text, sequences, length, seed, progress)
    run = _Run(model, blocks, batch_size, 1 + len(names), progress)
    tight = run.tight(tight_tol)
    rows = {}
    for name in names:
        with solving(model, name, tol):
            rows[name] = run.solve(name, tight)
    paper = rows.get(PAPER)
    for row in rows.values():
        row["seconds_ratio"] = paper and row["seconds"] / paper["seconds"]
    results = _header(checkpoint, text, model, blocks, batch_size, seed)
    results |= {"max_iters": model.config.eval_max_iters, "tight": tight.numbers, "schedules": rows}
    write_json(path, results)
    return results


def budget(
    checkpoint: Path | str,
    text: Path | str | None = None,
    *,
    iterations: Sequence[int] = ITERATIONS,
    schedules: Sequence[str] = BUDGET_SCHEDULES,
    tol: float | None = None,
    sequences: int = 8,
    length: int = 256,
    tight_tol: float = TIGHT_TOL,
    batch_size: int = 4,
    seed: int = 0,
    out: Path | None = None,
    progress: Report | None = None,
) -> dict:
    """Perplexity against the iterations ℓmax that a token may have (eval_max_iters).

    Writes DIR/eval/budget.json and DIR/figures/budget.png, DIR = `out`, by default the checkpoint.

    Args:
        iterations: the values of ℓmax; solved in ascending order. The rest as of `agree`.
    Returns:
        {"tight": {…}, "schedules": {name: [a row for each ℓmax: {"max_iters", "perplexity",
        "perplexity_ratio", "work", "num_iters", "unconverged", "seconds", …}]}, …}.
    Raises:
        AgreementError, GenerationError, DataError: as `agree`; an ℓmax below 1.
    """
    _check(schedules, sequences, length, batch_size, seed, tol=tol, tight_tol=tight_tol)
    if not iterations or min(iterations) < 1:
        shown = ",".join(map(str, iterations)) or "empty"
        raise AgreementError(f"iterations is {shown}: numbers of iterations, each at least 1")
    _check_checkpoint(checkpoint)
    require("matplotlib", "fprnn budget")
    folder = Path(out) if out else Path(checkpoint)
    for below in ("eval", "figures"):
        check_folder(folder / below)
    model, tokenizer = _load(checkpoint)
    names, counts = _schedules(model, schedules), sorted(set(iterations))
    blocks = _blocks(model, tokenizer, text, sequences, length, seed, progress)
    run = _Run(model, blocks, batch_size, 1 + len(names) * len(counts), progress)
    tight = run.tight(tight_tol)
    rows = {name: [] for name in names}
    for name in names:
        for count in counts:
            with solving(model, name, tol, count):
                solved = run.solve(f"{name}, ℓmax {count}", tight)
            rows[name].append({"max_iters": count} | solved)
    results = _header(checkpoint, text, model, blocks, batch_size, seed)
    results |= {"tight": tight.numbers, "schedules": rows}
    write_json(folder / "eval" / "budget.json", results)
    draw_budget(results, folder / "figures" / "budget.png")
    return results


def table(results: dict) -> Table:
    """What `agree` returned, as a table: a row for each schedule."""
    from rich import box
    from rich.table import Table

    # Twelve columns in the 80 characters of a terminal: nothing stands between them.
    out = Table(
        title=_title(results), caption=_caption(results), caption_justify="left",
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0,
    )  # fmt: skip
    out.add_column("schedule", no_wrap=True, min_width=10)
    for head in ("tol", "max Δ", "mean Δ", "top-1", "ppl", "÷\ntight", "work", "ℓ*", "missed", "s",
                 "÷\npaper"):  # fmt: skip
        out.add_column(head, justify="right", no_wrap=True)
    same = {"difference": None, "top1": None, "perplexity_ratio": None, "seconds_ratio": None}
    for name, r in ({"tight": results["tight"] | same} | results["schedules"]).items():
        apart = r["difference"] or {"max": None, "mean": None}
        out.add_row(
            name, _short(r["tol"], "g"), _short(apart["max"], ".1e"), _short(apart["mean"], ".1e"),
            _short(r["top1"], ".1%"), f"{r['perplexity']:.2f}",
            _short(r["perplexity_ratio"], ".3f"), f"{r['work']:.1f}", f"{r['num_iters']:.0f}",
            f"{r['unconverged']:.1%}", f"{r['seconds']:.3g}", _short(r["seconds_ratio"], ".3g"),
        )  # fmt: skip
    return out


def _short(value: float | None, form: str) -> str:
    """A number as `form` says, 1e-05 as 1e-5; nothing for None."""
    return "" if value is None else format(value, form).replace("e-0", "e-")


def budget_table(results: dict) -> Table:
    """What `budget` returned, as a table: perplexity and work, a row for each ℓmax."""
    from rich.table import Table

    caption = "ppl: perplexity; work: evaluations of the iteration per token, mean over layers."
    caption += f"\ntight (sequential, tol {results['tight']['tol']:g}):"
    caption += f" ppl {results['tight']['perplexity']:.2f}, work {results['tight']['work']:.1f}"
    out = Table("ℓmax", title=_title(results), caption=caption, caption_justify="left")
    for name in results["schedules"]:
        out.add_column(f"{name}\nppl", justify="right")
        out.add_column("\nwork", justify="right")
    for rows in zip(*results["schedules"].values()):
        cells = (cell for r in rows for cell in (f"{r['perplexity']:.2f}", f"{r['work']:.1f}"))
        out.add_row(str(rows[0]["max_iters"]), *cells)
    return out


def draw_budget(results: dict, path: Path) -> Path:
    """Draw what `budget` returned to the PNG `path`: perplexity against ℓmax, and against the work
    that it took."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
    curves = results["schedules"]
    panels = {
        "max_iters": "ℓmax: iterations a token may have",
        "work": "work: evaluations of the iteration per token",
    }
    for axis, (key, label) in zip(axes, panels.items()):
        # Each thinner than the one before, so that curves on top of each other are all seen.
        for i, ((name, rows), marker) in enumerate(zip(curves.items(), "osD^vPX" * 9)):
            x, y = [r[key] for r in rows], [r["perplexity"] for r in rows]
            share = i / max(1, len(curves) - 1)
            axis.plot(x, y, marker=marker, ms=8 - 5 * share, lw=3.4 - 2.4 * share, label=name)
        axis.axhline(results["tight"]["perplexity"], color="gray", ls="--", lw=1.2, label="tight")
        axis.set(xlabel=label, xscale="log", yscale="log")
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_locator(LogLocator(subs=(1, 2, 5)))
            one.set_major_formatter(StrMethodFormatter("{x:g}"))
            one.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    values = [r["perplexity"] for rows in curves.values() for r in rows]
    if max(values) < 3 * min(values):  # a logarithmic axis would have one label, or none
        axes[0].set_yscale("linear")
    axes[0].set_ylabel("perplexity per token")
    axes[0].legend(fontsize="small")
    figure.suptitle(f"What iterations buy: {_title(results)}", fontsize="medium")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


class _Solved:
    """A solution: hidden (n,l,d_model) and top (n,l) on the CPU, and the numbers of its row."""

    def __init__(self, hidden, top, numbers: dict[str, Any]):
        self.hidden, self.top, self.numbers = hidden, top, numbers


class _Run:
    """The same blocks (n, length + 1) solved again and again, with progress over `times` times."""

    def __init__(self, model, blocks, batch_size: int, times: int, progress: Report | None):
        self.model, self.progress = model, progress or (lambda done, total, text: None)
        self.batches = blocks.to(model.device).split(batch_size)
        self.done, self.total = 0, times * len(self.batches)

    def tight(self, tol: float) -> _Solved:
        """The solution to compare with: sequential, to `tol`, with as many iterations as needed."""
        most = max(TIGHT_MAX_ITERS, self.model.config.eval_max_iters)
        with solving(self.model, "parallel", None, 1):
            self._backbone(self.batches[0][:, :-1])  # what the first call sets up is not timed
        with solving(self.model, "sequential", tol, most):
            return self._solve("tight")

    def solve(self, name: str, tight: _Solved) -> dict:
        """The row of one solution of what the config says, compared with the tight one."""
        solved = self._solve(name)
        apart = (solved.hidden - tight.hidden).abs().amax(-1)
        apart = apart / tight.hidden.abs().amax(-1).clamp_min(1e-30)
        return solved.numbers | {
            "difference": {"max": apart.max().item(), "mean": apart.mean().item()},
            "top1": (solved.top == tight.top).double().mean().item(),
            "perplexity_ratio": solved.numbers["perplexity"] / tight.numbers["perplexity"],
        }

    def _backbone(self, ids):
        """(output, seconds) of a forward pass through the backbone."""
        import torch

        cuda = ids.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.no_grad():
            output = self.model.backbone(ids)
        if cuda:
            torch.cuda.synchronize()
        return output, time.perf_counter() - began

    def _solve(self, name: str) -> _Solved:
        import torch
        import torch.nn.functional as F

        from lm.model.non_finite import NonFiniteError

        loss, spent, hidden, top, stats = 0.0, 0.0, [], [], []
        for batch in self.batches:
            try:
                output, seconds = self._backbone(batch[:, :-1])
            except NonFiniteError as e:
                raise AgreementError(f"{name}: {e}") from None
            with torch.no_grad():
                logits = self.model.lm_head(output.last_hidden_state).float()
                targets = batch[:, 1:].flatten()
                loss += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
            hidden.append(output.last_hidden_state.float().cpu())
            top.append(logits.argmax(-1).cpu())
            stats.append(output.fixed_point)
            spent += seconds
            self.done += 1
            last = len(stats) == len(self.batches)
            self.progress(self.done, self.total, name if last else None)
        hidden, top = torch.cat(hidden), torch.cat(top)

        def mean(field):
            return torch.cat([getattr(s, field) for s in stats], 1).double().mean().item()

        numbers = {
            "tol": self.model.backbone.layers[0].block.rule().tol,
            "perplexity": math.exp(loss / top.numel()),
            **{field: mean(field) for field in ("work", "num_iters", "unconverged")},
            "seconds": spent,
        }
        return _Solved(hidden, top, numbers)


def _check(schedules, sequences, length, batch_size, seed, **tolerances) -> None:
    """Refuse what needs no model to be refused."""
    if schedules is not None and not schedules:
        raise AgreementError(f"no schedules given; by default they are {', '.join(SCHEDULES)}")
    sizes = {"sequences": sequences, "length": length, "batch_size": batch_size}
    for name, value in sizes.items():
        if value < 1:
            raise AgreementError(f"{name} is {value}: it must be at least 1")
    if seed < 0:
        raise AgreementError(f"seed is {seed}: it must be at least 0")
    for name, value in tolerances.items():
        if value is not None and not 0 < value < math.inf:
            raise AgreementError(f"{name} is {value:g}: it is a relative residual, above 0")


def _check_checkpoint(checkpoint: Path | str) -> None:
    if not Path(checkpoint).is_dir():
        raise AgreementError(
            f"no checkpoint folder at {checkpoint}: make one with `fprnn export RUN {checkpoint}`"
        )


def _load(checkpoint: Path | str):
    """(model in float32, tokenizer) of an exported folder of ours."""
    model, tokenizer = load_exported(checkpoint)
    if model.config.model_type != "fprnn":
        raise AgreementError(
            f"{checkpoint} is a {model.config.model_type} model: it has no fixed point, so there is"
            " nothing to solve in several ways; give the export of a `model.name: fprnn` run"
        )
    return model.float(), tokenizer


def _has(model, schedule: str) -> bool:
    try:
        with solving(model, schedule):
            return True
    except GenerationError:
        return False


def _schedules(model, names: Sequence[str]) -> list[str]:
    """The names, each once, all of them possible for this model."""
    for name in names:
        with solving(model, name):  # a wrong one is an error now, not after the others
            pass
    return list(dict.fromkeys(names))


def _blocks(model, tokenizer, text, sequences: int, length: int, seed: int, progress=None):
    """Up to `sequences` blocks (n, length + 1) of the text, at random places; inputs are all but
    the last token of a block and targets all but the first."""
    import numpy as np
    import torch

    from lm.config import Data
    from lm.data.packing import encode_documents
    from lm.data.sources import documents, is_validation

    if text is not None and not Path(text).is_file():
        raise AgreementError(f"no text file at {text}")
    if getattr(tokenizer, "backend_tokenizer", None) is None or tokenizer.eos_token_id is None:
        raise AgreementError(
            "the checkpoint's tokenizer has no fast implementation or no EOS token"
        )
    if progress:
        progress(0, None, "reading the text")
    data = Data() if text is None else Data(source="text", path=str(text))
    texts = [t for t in documents(data) if text is not None or is_validation(t, data.val_fraction)]
    tokens = torch.from_numpy(encode_documents(tokenizer, texts))
    where = text or "the built-in corpus"
    if len(tokens) < length + 1:
        raise AgreementError(
            f"{where} has {len(tokens):,} tokens, but a sequence of length {length:,} needs"
            f" {length + 1:,} (with the last target): give a longer text, or a smaller length"
        )
    if tokens.max() >= model.config.vocab_size:
        raise AgreementError(
            f"the tokenizer makes token {tokens.max()}, but the model has a vocabulary of"
            f" {model.config.vocab_size}: they do not belong together"
        )
    starts = np.arange((len(tokens) - 1) // length) * length
    chosen = np.random.default_rng(seed).permutation(starts)[:sequences]
    return torch.stack([tokens[s : s + length + 1] for s in sorted(chosen)])


def _header(checkpoint, text, model, blocks, batch_size: int, seed: int) -> dict:
    """What was compared, for the results file."""
    import torch
    import transformers

    return {
        "checkpoint": "/".join(Path(checkpoint).resolve().parts[-2:]).strip("/"),
        "text": Path(text).name if text else "the built-in corpus, held-out documents",
        "sequences": blocks.shape[0],
        "length": blocks.shape[1] - 1,
        "batch_size": batch_size,
        "seed": seed,
        "device": model.device.type,
        "trained_with": {"schedule": model.config.schedule, "stopping": model.config.stopping},
        "versions": {
            "fprnn": lm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "meaning": MEANING,
    }


def _title(results: dict) -> str:
    return f"{results['checkpoint']}, {results['sequences']} × {results['length']:,} tokens"


def _caption(results: dict) -> str:
    trained = results["trained_with"]
    own = trained["schedule"] if trained["stopping"] == "causal" else PAPER
    return (
        "Δ: ‖h − h_tight‖∞ / ‖h_tight‖∞ of a token's last hidden state h.\n"
        "top-1: same most likely token as tight. ppl: perplexity.\n"
        "work: evaluations of the iteration per token, mean over layers.\n"
        "ℓ*: iterations until a sequence had converged. s: seconds of the backbone.\n"
        f"missed: tokens (paper: sequences) not converged to tol. Trained with: {own}."
    )
