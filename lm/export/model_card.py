"""The model card (README.md) of an export: facts from the run directory, and the missing ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lm import __version__
from lm.common.files import read_mapping
from lm.config.data import Data
from lm.config.schema import Config
from lm.data.corpus.prepare import place_in_run
from lm.data.sources import traces
from lm.data.sources.mixture import parts
from lm.export.measured import BEGIN, END, NOTHING_MEASURED, known
from lm.runs.metrics import ELSEWHERE_NOTE, is_elsewhere, iter_metrics, marked
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


@dataclass
class Facts:
    """Origin of a model; every line is an item of a Markdown list.

    Attributes:
        datasets: Names on the hub, for the front matter.
    """

    data: list[str]
    training: list[str]
    validation: list[str] = field(default_factory=list)
    limitations: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)


def of_run(run: RunDir, cfg: Config, manifest: dict) -> Facts:
    """Return the facts that a run directory has about one of its checkpoints.

    A file of the run that is missing or damaged leaves its line out, or the card says so.

    Args:
        run: The run directory.
        cfg: Its configuration.
        manifest: Manifest of the checkpoint.
    """
    step = manifest["step"]
    records = [r for r in iter_metrics(run.path) if r is not None and r["step"] == step]
    facts = Facts(_data(run, cfg), _training(run, cfg, manifest))
    for name, describe in (("validation", _validation), ("probe", _iterations)):
        found = [record[name] for record in records if name in record]
        facts.validation += known(describe, found[-1]) if found else []
    facts.validation = facts.validation or ["Not validated at this update."]
    facts.limitations = [
        f"It was trained on {_tokens(cfg, manifest)} in sequences of {cfg.data.seq_len}: what it"
        " does with longer ones was not measured in training."
    ]
    sources = [part.data for part in parts(cfg).values()]
    facts.datasets = sorted({s.dataset for s in sources if s.source == "fineweb"})
    return facts


def _tokens(cfg: Config, manifest: dict) -> str:
    """Return the number of tokens trained on until a checkpoint, in words."""
    return f"{manifest['step'] * manifest['global_batch_size'] * cfg.data.seq_len:,} tokens"


def _data(run: RunDir, cfg: Config) -> list[str]:
    lines = []
    for name, part in parts(cfg).items():
        label = f"`{name}`: " if name else ""
        lines.append(
            f"- {label}{_source(part.data)}; {part.data.val_fraction:.2%} of the documents held out"
            " for validation, chosen by a hash of their content."
        )
        folder = place_in_run(run.path, name)
        manifest = read_mapping(folder / "corpus.json") or read_mapping(folder / "meta.json") or {}
        lines += known(_corpus, manifest)
    if cfg.tokenizer.name == "bpe":
        lines.append(
            "- Tokenizer: a byte-level BPE trained on at most"
            f" {cfg.tokenizer.train_bytes:,} bytes of that text."
        )
    else:
        lines.append(f"- Tokenizer: `{_public(cfg.tokenizer.name)}`.")
    return [*lines, "- The licence of the text is that of its source; fprnn does not know it."]


def _source(source: Data) -> str:
    if source.source == "builtin":
        return "`builtin`, the text that every Python installation carries"
    if source.source == "fineweb":
        page = f"https://huggingface.co/datasets/{source.dataset}"
        return f"[{source.dataset}]({page}), configuration `{source.name}`, streamed"
    if source.source == "traces":
        settings = traces.described(source.traces).items()
        return f"traces, made by fprnn ({', '.join(f'{key} {value}' for key, value in settings)})"
    return f"{source.source} files, `{Path(source.path or '').name}`"


def _corpus(manifest: dict) -> list[str]:
    """Describe corpus.json, or meta.json where the run keeps its corpus itself."""
    if not manifest:
        return ["- No manifest of the tokenised text was kept with the run."]
    if manifest.get("complete") is False:
        counts = f"{manifest['val_documents']:,} documents, {manifest['val_tokens']:,} tokens"
        return [f"- Held out: {counts}."]
    documents, tokens = (
        manifest.get(name) or manifest[f"train_{name}"] + manifest[f"val_{name}"]
        for name in ("documents", "tokens")
    )
    sums = ", ".join(f"`{name}` {digest}" for name, digest in (manifest["sha256"] or {}).items())
    lines = [f"- {documents:,} documents, {tokens:,} tokens of this tokenizer."]
    return lines + ([f"- sha256 of the tokenised text: {sums}."] if sums else [])


def _public(name: str) -> str:
    """Return a name on the hub as it is, and of a folder of this machine the last part."""
    is_folder = name.startswith((".", "/", "~")) or Path(name).is_dir()
    return Path(name).name if is_folder else name


def _training(run: RunDir, cfg: Config, manifest: dict) -> list[str]:
    step, world_size, optim = manifest["step"], manifest["world_size"], cfg.optim
    environment, result = read_mapping(run.environment) or {}, read_mapping(run.result) or {}
    # Earlier versions had Muon.
    optimizer = "Muon and AdamW" if manifest.get("optimizer", {}).get("muon") else "AdamW"
    lines = [
        f"- {step:,} of {cfg.train.steps:,} updates, {_tokens(cfg, manifest)}:"
        f" {manifest['global_batch_size']} sequences an update, seed {cfg.seed},"
        f" {cfg.train.precision}.",
        f"- {optimizer}: peak learning rate {optim.lr:g}, schedule `{optim.schedule}` with warm-up"
        f" {optim.warmup:g} and floor {optim.min_lr:g}, betas {optim.betas[0]:g} and"
        f" {optim.betas[1]:g}, weight decay {optim.weight_decay:g}, gradients clipped at"
        f" {optim.grad_clip:g}.",
    ]
    if "device" in environment:
        ranks = f"{world_size} process{'es' * (world_size > 1)}"
        lines.append(f"- {ranks}; {environment['device']}.")
    else:
        lines.append("- On what hardware is not known.")
    if result.get("updates") == step and "training_seconds" in result:
        lines.append(f"- {result['training_seconds']:,} seconds.")
    names = ("fprnn", "commit", "python", "torch", "deepspeed")
    versions = [f"{name} {environment[name]}" for name in names if environment.get(name)]
    return lines + ([f"- Trained with {', '.join(versions)}."] if versions else [])


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
    layers = ", ".join(f"{mean} (layer {i})" for i, mean in zip(numbers, marked(counts)))
    line = f"- Mean iterations ℓ\\* of the paper's procedure on a held-out batch: {layers}."
    return [line, f"- {ELSEWHERE_NOTE}."] if any(is_elsewhere(counts)) else [line]


def card(
    model: PreTrainedModel,
    name: str,
    origin: str,
    facts: Facts | None,
    has_tokenizer: bool,
    licence: str | None,
) -> str:
    """Return the text of the card.

    Args:
        model: The exported model.
        name: Title.
        origin: Origin of the weights, in sentences.
        facts: Facts of its training; None: it was not trained here.
        has_tokenizer: Whether a tokenizer lies next to the model.
        licence: Licence of the weights, as the hub names it; None: not known.
    """
    from huggingface_hub import ModelCardData

    is_solved = bool(getattr(model, "fixed_point_blocks", list)())
    unknown = ["Not known: this model was not trained by fprnn."]
    facts = facts or Facts(unknown, unknown)
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
        "Use": _snippet(has_tokenizer),
        "The model": _architecture(model, is_solved),
        "Data": facts.data,
        "Training": facts.training,
        "Validation": facts.validation,
        "Measured on this folder": [BEGIN, NOTHING_MEASURED, END],
        "Limitations": [f"- {text}" for text in (ALWAYS, *facts.limitations)],
        "Licence": [weights + " The code of fprnn in this folder: Apache-2.0."],
        "Versions": _versions(),
        "Paper": [CITATION] if is_solved else [],
    }
    text = f"---\n{front.rstrip()}\n---\n\n# {name}\n\n{origin}\n"
    for title, lines in sections.items():
        if lines:
            text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    return text


def _snippet(has_tokenizer: bool) -> list[str]:
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    use = [
        "tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        'ids = tokenizer("The following", return_tensors="pt")["input_ids"]',
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))",
    ]
    if not has_tokenizer:
        imports = ["import torch", "from transformers import AutoModelForCausalLM"]
        use = [
            "ids = torch.tensor([[1, 2, 3]])  # no tokenizer came with this model",
            "print(model.generate(ids, max_new_tokens=20))",
        ]
    model = "model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()"
    return ["```python", *imports, "", HERE, model, *use, "```"]


def _architecture(model: PreTrainedModel, is_solved: bool) -> list[str]:
    c = model.config
    count = sum(p.numel() for p in model.parameters())
    lines = [f"- `{c.model_type}`, {count:,} parameters (fp32), {c.vocab_size:,} tokens."]
    lines.append(f"- {c.n_layer} layers of width {c.d_model}: `{c.layers or c.block}`.")
    if is_solved:
        lines += [
            f"- Channel mixer `{c.mixer}` of rank {c.mixer_rank}, state size {c.d_state}.",
            f"- Solver: token `{c.token}`, schedule `{c.schedule}`, stopping `{c.stopping}`;"
            f" tolerance in evaluation `{c.eval_tol}`, at most {c.eval_max_iters:,} iterations;"
            f" gradient `{c.gradient}`. No weight depends on it: `model.solving(…)` takes another.",
        ]
    return lines


def _versions() -> list[str]:
    import torch
    import transformers

    return [
        f"- Needs {', '.join(f'`{needed}`' for needed in NEEDED)}; fprnn need not be installed.",
        f"- Written by fprnn {__version__} with torch {torch.__version__}, transformers"
        f" {transformers.__version__}.",
        SPEED,
    ]
