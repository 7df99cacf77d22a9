"""The model card (README.md) of an export: facts from the run directory, and the missing ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from lm import __version__
from lm.common.files import read_mapping
from lm.config.schema import Config
from lm.config.yaml_text import Dumper
from lm.data.sources.mixture import parts
from lm.runs.metrics import (
    ELSEWHERE_NOTE,
    find_other_solutions,
    format_marked_iterations,
    iter_metrics,
)
from lm.runs.run_dir import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Requirements of an export: `dependencies` of pyproject.toml (a test compares).
NEEDED = ("torch>=2.11,<2.14", "transformers>=5.0,<6", "safetensors>=0.5")
PAPER = "https://arxiv.org/abs/2503.10799"
HERE = 'path = "."  # this folder; on the hub its name there'
ALWAYS = (
    "A research model that continues text. It follows no instructions, it may say what is false or"
    " harmful, and it has the biases of its data: none of this was measured."
)
SCORES = "`eval/results.json`, which `fprnn eval` writes."
# Sections of a run's configuration that a card shows; the others change no weight.
SHOWN = {"seed", "init_from", "model", "solver", "tokenizer", "data", "optim", "train"}
CITATION = f"""[Fixed-Point RNNs: Interpolating from Diagonal to Dense]({PAPER}), NeurIPS 2025.

```bibtex
@inproceedings{{movahedi2025fixedpoint,
  title = {{Fixed-Point RNNs: Interpolating from Diagonal to Dense}},
  author = {{Sajad Movahedi and Felix Sarnthein and Nicola Muca Cirone and Antonio Orvieto}},
  booktitle = {{Advances in Neural Information Processing Systems}},
  year = {{2025}},
  url = {{{PAPER}}}
}}
```"""
SPEED = (
    "- Speed: where fprnn is installed its kernels are used, elsewhere those that came with the"
    " code; on a CPU g++ or clang++ compiles them at first use (up to a minute). Without a compiler"
    " fixed-point layers run in plain PyTorch, some 100 times slower."
)


class Facts(NamedTuple):
    """Facts of a model's training; every text is a line of Markdown.

    Attributes:
        datasets: Names on the hub, for the front matter.
    """

    training: list[str]
    validation: list[str]
    limitations: list[str]
    datasets: list[str]


def of_run(run: RunDir, cfg: Config, manifest: dict) -> Facts:
    """Return the facts that a run directory has about one of its checkpoints.

    A file of the run that is missing or damaged leaves its line out, or the card says so.

    Args:
        run: The run directory.
        cfg: Its configuration.
        manifest: Manifest of the checkpoint.
    """
    step, size = manifest["step"], manifest["global_batch_size"]
    tokens = f"{step * size * cfg.data.seq_len:,} tokens"
    environment = read_mapping(run.environment) or {}
    names = ("device", "fprnn", "commit", "python", "torch", "deepspeed")
    used = [f"{name} {environment[name]}" for name in names if environment.get(name)]
    config = _without_places(cfg.model_dump(mode="json", include=SHOWN))
    text = yaml.dump(
        config, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None
    )
    training = [
        f"- {step:,} of {cfg.train.steps:,} updates, {tokens}: {size} sequences an update.",
        f"- {manifest['world_size']} ranks; {', '.join(used) or 'on what hardware is not known'}.",
        "- The licence of the text is that of its source; fprnn does not know it.",
        "- Its configuration, of files the names alone:",
        "",
        "```yaml",
        text.rstrip(),
        "```",
    ]
    records = [r for r in iter_metrics(run.path) if r is not None and r["step"] == step]
    validation: list[str] = []
    for name, describe in (("validation", _validation), ("probe", _iterations)):
        found = [record[name] for record in records if name in record]
        validation += _known(describe, found[-1]) if found else []
    limitation = (
        f"It was trained on {tokens} in sequences of {cfg.data.seq_len}: what it does with longer"
        " ones was not measured in training."
    )
    sources = [part.data for part in parts(cfg).values()]
    datasets = sorted({s.dataset for s in sources if s.source == "fineweb"})
    return Facts(training, validation or ["Not validated at this update."], [limitation], datasets)


def _known(describe: Callable[[dict], list[str]], record: dict) -> list[str]:
    """Return the lines about a record; none if it is damaged."""
    try:
        return describe(record)
    except (LookupError, TypeError, AttributeError, ValueError):
        return []


def _without_places(value: Any) -> Any:
    """Return a value of a configuration, each path to a file of this machine as its last part."""
    if isinstance(value, dict):
        return {key: _without_places(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_without_places(below) for below in value]
    is_place = isinstance(value, str) and (
        value.startswith((".", "/", "~")) or os.path.exists(value)
    )
    return Path(value).name if is_place else value


def _validation(scores: dict) -> list[str]:
    text = f"- Held-out text of the same source: perplexity {scores['perplexity']:.3f} a token on"
    lines = [f"{text} {scores['tokens']:,} tokens."]
    if scores.get("bits_per_byte") is not None:
        lines.append(f"- {scores['bits_per_byte']:.4f} bits per byte of {scores['bytes']:,} bytes.")
    for name, of in scores.get("sources", {}).items():
        lines.append(f"- Of `{name}`: perplexity {of['perplexity']:.3f}.")
    return lines


def _iterations(probe: dict) -> list[str]:
    counts = probe["num_iters"]
    numbers = probe.get("layers", range(len(counts["mean"])))
    layers = ", ".join(
        f"{mean} (layer {i})" for i, mean in zip(numbers, format_marked_iterations(counts))
    )
    line = f"- Mean iterations ℓ\\* of the paper's procedure on a held-out batch: {layers}."
    return [line, f"- {ELSEWHERE_NOTE}."] if any(find_other_solutions(counts)) else [line]


def card(
    model: PreTrainedModel,
    name: str,
    origin: str,
    facts: Facts | None,
    licence: str | None,
) -> str:
    """Return the text of the card.

    Args:
        model: The exported model.
        name: Title.
        origin: Origin of the weights, in sentences.
        facts: Facts of its training; None: not known.
        licence: Licence of the weights, as the hub names it; None: not known.
    """
    from huggingface_hub import ModelCardData

    has_code = type(model).__module__.startswith("lm.")  # otherwise a class of transformers
    is_solved = bool(getattr(model, "fixed_point_blocks", list)())
    facts = facts or Facts([], [], [], [])
    front = ModelCardData(
        license=licence or "unknown",  # the hub's word
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[model.config.model_type, *(["fixed-point-rnn"] if is_solved else [])],
        datasets=facts.datasets or None,
    ).to_yaml()
    weights = f"Weights: {licence}."
    if licence is None:
        weights = "Weights: whoever trained them has not said (`fprnn export --licence`)."
    sections = {
        "Use": _snippet(has_code),
        "The model": _architecture(model, is_solved),
        "Training": facts.training,
        "Validation": facts.validation,
        "Scores": [SCORES],
        "Limitations": [f"- {text}" for text in (ALWAYS, *facts.limitations)],
        "Licence": [weights + " The code of fprnn in this folder: Apache-2.0." * has_code],
        "Versions": _versions(has_code),
        "Paper": [CITATION] if is_solved else [],
    }
    text = f"---\n{front.rstrip()}\n---\n\n# {name}\n\n{origin}\n"
    for title, lines in sections.items():
        if lines:
            text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    return text


def _snippet(has_code: bool) -> list[str]:
    trust = ", trust_remote_code=True" if has_code else ""
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        HERE,
        f"model = AutoModelForCausalLM.from_pretrained(path{trust}).eval()",
        f"tokenizer = AutoTokenizer.from_pretrained(path{trust})",
        'ids = tokenizer("The following", return_tensors="pt")["input_ids"]',
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))",
        "```",
    ]


def _architecture(model: PreTrainedModel, is_solved: bool) -> list[str]:
    count = sum(p.numel() for p in model.parameters())
    lines = [
        f"- `{model.config.model_type}`, {count:,} parameters (fp32), {model.config.vocab_size:,}"
        " tokens; config.json has its layers."
    ]
    if is_solved:
        lines.append(
            "- No weight depends on the solver of config.json: `model.solving(…)` takes another."
        )
    return lines


def _versions(has_code: bool) -> list[str]:
    import torch
    import transformers

    lines = [
        f"- Needs {', '.join(f'`{needed}`' for needed in NEEDED)}; fprnn need not be installed.",
        f"- Written by fprnn {__version__} with torch {torch.__version__}, transformers"
        f" {transformers.__version__}.",
    ]
    return [*lines, SPEED] if has_code else lines
