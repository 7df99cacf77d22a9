"""Model card (README.md) of an export, with facts from the run directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from lm import __version__
from lm.common.files import read_mapping
from lm.config.schema import Config
from lm.config.yaml_text import Dumper
from lm.data.sources.mixture import configs_by_source
from lm.runs.metrics import (
    OTHER_SOLUTION_NOTE,
    find_other_solutions,
    format_marked_iterations,
    iter_metrics,
)
from lm.runs.path_checks import looks_local
from lm.runs.run_dir import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Requirements of an export, equal to `dependencies` in pyproject.toml (a test compares them).
REQUIREMENTS = ("torch>=2.11,<2.14", "transformers>=5.0,<6", "safetensors>=0.5")
PATH_KEYS = ("path", "download_dir", "cache_dir")
PAPER_URL = "https://arxiv.org/abs/2503.10799"
EXAMPLE = [
    "```python",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'path = "."  # this folder, or the name of the model on the hub',
    "model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()",
    "tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
    'ids = tokenizer("The following", return_tensors="pt")["input_ids"]',
    "print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))",
    "```",
]
GENERAL_LIMITATION = (
    "This is a research model that continues text. It does not follow instructions, its output may"
    " be false or harmful, and it has the biases of its data. None of this was measured."
)
SCORES = "`fprnn eval` writes scores to `eval/results.json`."
# Sections of the configuration that the card shows: those that training depends on.
SECTIONS = {"seed", "init_from", "model", "solver", "tokenizer", "data", "optim", "train"}
CITATION = f"""[Fixed-Point RNNs: Interpolating from Diagonal to Dense]({PAPER_URL}), NeurIPS 2025.

```bibtex
@inproceedings{{movahedi2025fixedpoint,
  title = {{Fixed-Point RNNs: Interpolating from Diagonal to Dense}},
  author = {{Sajad Movahedi and Felix Sarnthein and Nicola Muca Cirone and Antonio Orvieto}},
  booktitle = {{Advances in Neural Information Processing Systems}},
  year = {{2025}},
  url = {{{PAPER_URL}}}
}}
```"""
SPEED = (
    "- Speed: the model uses the kernels of fprnn if it is installed, and otherwise the kernels in"
    " this folder. On a CPU, g++ or clang++ compiles them at first use, which takes up to a minute."
    " Without a compiler, fixed-point layers run in plain PyTorch, about 100 times slower."
)


class Facts(NamedTuple):
    """Facts about the training of a model, as text for the sections of the card."""

    training: list[str]  # Markdown lines
    validation: list[str]  # Markdown lines
    limitations: list[str]  # sentences
    datasets: list[str]  # names of the training data sets on the hub


def read_facts(run: RunDir, cfg: Config, manifest: dict) -> Facts:
    """Return the facts about a checkpoint of a run.

    Facts from missing or damaged files of the run are left out.

    Args:
        run: The run directory.
        cfg: Configuration of the run.
        manifest: Manifest of the checkpoint.
    """
    step, batch_size = manifest["step"], manifest["global_batch_size"]
    tokens = f"{step * batch_size * cfg.data.seq_len:,} tokens"
    rank_count = manifest["world_size"]
    ranks = "1 rank" if rank_count == 1 else f"{rank_count} ranks"
    training = [
        f"- {step:,} of {cfg.train.steps:,} updates with {batch_size} sequences each, {tokens} in"
        " all.",
        f"- {ranks}; {_describe_environment(run)}.",
        "- Licence of the training text: see its source.",
        "- Configuration (file names without folders):",
        "",
        "```yaml",
        _format_config(cfg),
        "```",
    ]
    limitation = (
        f"It was trained on {tokens} in sequences of {cfg.data.seq_len} tokens. Longer sequences"
        " were not evaluated during training."
    )
    sources = [source_cfg.data for source_cfg in configs_by_source(cfg).values()]
    return Facts(
        training,
        validation=_describe_validation(run, step) or ["This checkpoint was not validated."],
        limitations=[limitation],
        datasets=sorted({data.dataset for data in sources if data.source == "fineweb"}),
    )


def _describe_environment(run: RunDir) -> str:
    """Return the device of a run and the versions of its software."""
    environment = read_mapping(run.environment) or {}
    names = ("device", "fprnn", "commit", "python", "torch", "deepspeed")
    entries = [f"{name} {environment[name]}" for name in names if environment.get(name)]
    return ", ".join(entries) or "unknown hardware"


def _format_config(cfg: Config) -> str:
    """Return the sections of a configuration in SECTIONS, as YAML without folders."""
    config = _strip_folders(cfg.model_dump(mode="json", include=SECTIONS))
    options: dict = {"sort_keys": False, "allow_unicode": True, "default_flow_style": None}
    return yaml.dump(config, Dumper=Dumper, **options).rstrip()


def _describe_validation(run: RunDir, step: int) -> list[str]:
    """Return lines about the last validation and the last probe (ℓ* of each layer) at an update.

    A damaged record is left out.
    """
    lines: list[str] = []
    records = [r for r in iter_metrics(run.path) if r is not None and r["step"] == step]
    for key, describe in (("validation", _describe_scores), ("probe", _describe_iterations)):
        values = [record[key] for record in records if key in record]
        if values:
            with contextlib.suppress(LookupError, TypeError, AttributeError, ValueError):
                lines += describe(values[-1])
    return lines


def _strip_folders(value: Any, key: str = "") -> Any:
    """Return the value of a key of a configuration, with each path reduced to its file name."""
    if isinstance(value, dict):
        return {name: _strip_folders(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_strip_folders(item, key) for item in value]
    is_path = isinstance(value, str) and (
        key in PATH_KEYS
        or value.startswith((".", "/", "~"))
        or ("/" in value and looks_local(value))
        or os.path.exists(value)
    )
    return Path(value).name if is_path else value


def _describe_scores(scores: dict) -> list[str]:
    """Return lines about a validation, the record `validation` of metrics.jsonl."""
    lines = [
        f"- Perplexity per token on held-out text of the same source: {scores['perplexity']:.3f}"
        f" on {scores['tokens']:,} tokens."
    ]
    if scores.get("bits_per_byte") is not None:
        lines.append(
            f"- Bits per byte: {scores['bits_per_byte']:.4f} on {scores['bytes']:,} bytes."
        )
    for name, source_scores in scores.get("sources", {}).items():
        lines.append(f"- Perplexity on `{name}`: {source_scores['perplexity']:.3f}.")
    return lines


def _describe_iterations(probe: dict) -> list[str]:
    """Return lines about ℓ*, the record `probe` of metrics.jsonl."""
    counts = probe["num_iters"]
    layer_indices = probe.get("layers", range(len(counts["mean"])))
    # A mean has a mark, which OTHER_SOLUTION_NOTE explains, if it belongs to another solution.
    marked_means = format_marked_iterations(counts)
    means = ", ".join(f"{mean} (layer {i})" for i, mean in zip(layer_indices, marked_means))
    lines = [f"- Mean number of iterations ℓ\\* on a held-out batch, as in the paper: {means}."]
    if any(find_other_solutions(counts)):
        lines.append(f"- {OTHER_SOLUTION_NOTE}.")
    return lines


def format_card(
    model: PreTrainedModel, name: str, origin: str, facts: Facts | None, licence: str | None
) -> str:
    """Return the text of the model card.

    Args:
        model: The exported model.
        name: Title.
        origin: Sentences on the origin of the weights.
        facts: Facts about the training; None: unknown.
        licence: Licence of the weights by its name on the hub; None: unknown.
    """
    from huggingface_hub import ModelCardData

    has_fixed_point = hasattr(model, "fixed_point_blocks") and bool(model.fixed_point_blocks())
    facts = facts or Facts([], [], [], [])
    front_matter = ModelCardData(
        license=licence or "unknown",  # the hub's name of an unknown licence
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[model.config.model_type, *(["fixed-point-rnn"] if has_fixed_point else [])],
        datasets=facts.datasets or None,
    ).to_yaml()
    licence_text = licence or "unknown (set it with `fprnn export --licence`)"
    licence_line = f"Weights: {licence_text}. Code of fprnn in this folder: Apache-2.0."
    sections = {
        "Use": EXAMPLE,
        "The model": _describe_model(model, has_fixed_point),
        "Training": facts.training,
        "Validation": facts.validation,
        "Scores": [SCORES],
        "Limitations": [f"- {text}" for text in (GENERAL_LIMITATION, *facts.limitations)],
        "Licence": [licence_line],
        "Versions": _list_versions(),
        "Paper": [CITATION] if has_fixed_point else [],
    }
    text = f"---\n{front_matter.rstrip()}\n---\n\n# {name}\n\n{origin}\n"
    for title, lines in sections.items():
        if lines:
            text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    return text


def _describe_model(model: PreTrainedModel, has_fixed_point: bool) -> list[str]:
    parameter_count = sum(p.numel() for p in model.parameters())
    lines = [
        f"- `{model.config.model_type}`, {parameter_count:,} parameters (fp32), vocabulary of"
        f" {model.config.vocab_size:,} tokens. config.json describes the layers."
    ]
    if has_fixed_point:
        lines.append(
            "- The weights can be used with a solver other than the one in config.json:"
            " `model.solving(…)` selects it."
        )
    return lines


def _list_versions() -> list[str]:
    import torch
    import transformers

    requirements = ", ".join(f"`{package}`" for package in REQUIREMENTS)
    lines = [
        f"- Requires {requirements}. fprnn does not need to be installed.",
        f"- Written by fprnn {__version__} with torch {torch.__version__}, transformers"
        f" {transformers.__version__}.",
    ]
    return [*lines, SPEED]
