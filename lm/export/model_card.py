"""The model card (README.md) of an export: what is known of a model, and what is not, is said."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lm import __version__
from lm.common.files import read_mapping
from lm.config.data import Data, Traces
from lm.config.schema import Config, Optim
from lm.data.corpus.prepare import place_in_run
from lm.data.sources.mixture import parts
from lm.export.measured import BEGIN, END, NOTHING_MEASURED, known
from lm.runs.metrics import ELSEWHERE_NOTE, is_elsewhere, iter_metrics, marked
from lm.runs.run_dir import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNKNOWN = "unknown"  # the hub's word for a licence that nobody has said
# What transformers needs to load an export: `dependencies` of pyproject.toml (a test compares).
NEEDED = ("torch>=2.11,<2.14", "transformers>=5.0,<6", "safetensors>=0.5")
PAPER = "https://arxiv.org/abs/2503.10799"
# Where a model lies, in the snippet: the folder that the card is in, or what `with_place` says.
HERE = 'path = "."  # this folder; on the hub its name there'


@dataclass
class Facts:
    """What is known of how a model came to be; every line is an item of a Markdown list.

    Args:
        datasets: names on the hub, for the front matter.
    """

    data: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)
    iterations: list[str] = field(default_factory=list)
    limitations: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)


def of_run(run: RunDir, cfg: Config, manifest: dict) -> Facts:
    """What a run directory says of one of its checkpoints. A file of the run that is gone or
    damaged leaves its line out, or says so.

    Args:
        manifest: of the checkpoint.
    """
    step, tokens = manifest["step"], _tokens(cfg, manifest)
    facts = Facts(data=_data(run, cfg), datasets=_datasets(cfg))
    facts.training = _training(run, cfg, manifest)
    measured = [r for r in iter_metrics(run.path) if r is not None and r["step"] == step]
    scores = [r["validation"] for r in measured if "validation" in r]
    facts.validation = known(_validation, scores[-1] if scores else {}) or [
        "Not validated at this update."
    ]
    probes = [r["probe"] for r in measured if "probe" in r]
    facts.iterations = known(_iterations, probes[-1] if probes else {})
    facts.limitations = [
        f"It was trained on {tokens} in sequences of {cfg.data.seq_len}: what it does with longer"
        " ones was not measured in training."
    ]
    return facts


def _tokens(cfg: Config, manifest: dict) -> str:
    """How many were trained on until a checkpoint, in words."""
    return f"{manifest['step'] * manifest['global_batch_size'] * cfg.data.seq_len:,} tokens"


def _data(run: RunDir, cfg: Config) -> list[str]:
    lines = []
    for name, part in parts(cfg).items():
        source, folder = part.data, place_in_run(run.path, name)
        label = f"`{name}`: " if name else ""
        lines.append(f"- {label}{_source(source)}; {source.val_fraction:.2%} of the documents held")
        lines[-1] += " out for validation, chosen by a hash of their content."
        manifest = read_mapping(folder / "corpus.json") or read_mapping(folder / "meta.json") or {}
        lines += known(_manifest, manifest)
    if cfg.tokenizer.name == "bpe":
        lines.append(
            "- Tokenizer: a byte-level BPE trained on at most"
            f" {cfg.tokenizer.train_bytes:,} bytes of that text."
        )
    else:
        lines.append(f"- Tokenizer: `{_public(cfg.tokenizer.name)}`.")
    lines.append("- The licence of the text is that of its source; fprnn does not know it.")
    return lines


def _source(source: Data) -> str:
    if source.source == "builtin":
        return "`builtin`, the text that every Python installation carries"
    if source.source == "fineweb":
        page = f"https://huggingface.co/datasets/{source.dataset}"
        return f"[{source.dataset}]({page}), configuration `{source.name}`, streamed"
    if source.source == "traces":
        of = source.traces or Traces()
        gaps = ", ".join(map(str, of.gaps)) if isinstance(of.gaps, list) else f"up to {of.gaps}"
        words = f"{of.form} of {of.letters} elements" if of.letters else of.form
        return f"traces of the group {of.group} ({words}, gaps of {gaps}), made by fprnn"
    name = Path(source.path or "").name
    return f"{source.source} files, `{name}`"


def _manifest(manifest: dict) -> list[str]:
    """Of corpus.json, or of meta.json where the run keeps its corpus itself."""
    if not manifest:
        return ["- No manifest of the tokenised text was kept with the run."]
    if manifest.get("complete") is False:
        return [
            f"- Held out: {manifest['val_documents']:,} documents,"
            f" {manifest['val_tokens']:,} tokens."
        ]
    documents = manifest.get("documents") or manifest["train_documents"] + manifest["val_documents"]
    tokens = manifest.get("tokens") or manifest["train_tokens"] + manifest["val_tokens"]
    sums = ", ".join(f"`{name}` {digest}" for name, digest in (manifest["sha256"] or {}).items())
    lines = [f"- {documents:,} documents, {tokens:,} tokens of this tokenizer."]
    return lines + ([f"- sha256 of the tokenised text: {sums}."] if sums else [])


def _datasets(cfg: Config) -> list[str]:
    sources = [part.data for part in parts(cfg).values()]
    return sorted({source.dataset for source in sources if source.source == "fineweb"})


def _public(name: str) -> str:
    """A name on the hub as it is; of a folder of this machine the last part alone."""
    is_folder = name.startswith((".", "/", "~")) or Path(name).is_dir()
    return Path(name).name if is_folder else name


def _training(run: RunDir, cfg: Config, manifest: dict) -> list[str]:
    step, world_size = manifest["step"], manifest["world_size"]
    of, env = cfg.optim, read_mapping(run.environment) or {}
    result = read_mapping(run.result) or {}
    lines = [
        f"- {step:,} of {cfg.train.steps:,} updates, {_tokens(cfg, manifest)}:"
        f" {manifest['global_batch_size']} sequences an update, seed {cfg.seed},"
        f" {cfg.train.precision}.",
        f"- {_optimizer(of)}: peak learning rate {of.lr:g}, schedule `{of.schedule}` with warm-up"
        f" {of.warmup:g} and floor {of.min_lr:g}, betas {of.betas[0]:g} and {of.betas[1]:g},"
        f" weight decay {of.weight_decay:g}, gradients clipped at {of.grad_clip:g}.",
    ]
    if "device" in env:
        ranks = f"{world_size} process{'es' * (world_size > 1)}"
        lines.append(f"- {ranks}; {env['device']}.")
    else:
        lines.append("- On what hardware is not known.")
    if result.get("updates") == step and "training_seconds" in result:
        lines.append(f"- {result['training_seconds']:,} seconds.")
    names = ("fprnn", "commit", "python", "torch", "deepspeed")
    versions = [f"{name} {env[name]}" for name in names if env.get(name)]
    if versions:
        lines.append(f"- Trained with {', '.join(versions)}.")
    return lines


def _optimizer(of: Optim) -> str:
    if of.name == "muon":
        return "Muon for matrices, AdamW for the rest"
    return "AdamW"


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
    rows = [
        f"| {number} | {mean} | {median:g} | {most:g} |"
        for number, mean, median, most in zip(
            numbers, marked(counts), counts["median"], counts["max"]
        )
    ]
    if any(is_elsewhere(counts)):
        rows += ["", f"{ELSEWHERE_NOTE}."]
    return ["| layer | mean ℓ\\* | median | most |", "| --- | --- | --- | --- |", *rows]


def card(
    model: PreTrainedModel,
    name: str,
    origin: str,
    facts: Facts | None,
    has_tokenizer: bool,
    licence: str | None,
) -> str:
    """The card as text.

    Args:
        origin: where the weights come from, in sentences. facts: of its training; None: it was not
            trained here. licence: of the weights, as the hub names it; None: not said.
    """
    from huggingface_hub import ModelCardData

    solved = bool(getattr(model, "fixed_point_blocks", list)())
    front = ModelCardData(
        license=licence or UNKNOWN,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[model.config.model_type, *(["fixed-point-rnn"] if solved else [])],
        datasets=(facts and facts.datasets) or None,
    ).to_yaml()
    unknown = ["Not known: this model was not trained by fprnn."]
    facts = facts or Facts(unknown, unknown, [], [], [])
    sections = {
        "Use": _snippet(model, has_tokenizer),
        "The model": _architecture(model, solved),
        "Data": facts.data,
        "Training": facts.training,
        "Validation": facts.validation,
        "Iterations of each layer": facts.iterations
        and [_MEANING_OF_ITERATIONS, "", *facts.iterations],
        "Measured on this folder": [BEGIN, NOTHING_MEASURED, END],
        "Limitations": [f"- {text}" for text in (_ALWAYS, *facts.limitations)],
        "Licence": _licence(licence, model),
        "Versions": _versions(model),
    }
    if solved:
        sections["Paper"] = [_CITATION]
    text = f"---\n{front.rstrip()}\n---\n\n# {name}\n\n{origin}\n"
    for title, lines in sections.items():
        if lines:
            text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    return text


_MEANING_OF_ITERATIONS = (
    "ℓ\\* is the number of iterations that the paper's procedure (all tokens at once, tolerance"
    " 0.1) needs on a held-out batch. It says how hard the text is for a layer, not how this model"
    " is solved."
)
_ALWAYS = (
    "A research model that continues text. It follows no instructions, it may say what is false or"
    " harmful, and it has the biases of its data: none of this was measured."
)
_CITATION = f"""[Fixed-Point RNNs: Interpolating from Diagonal to Dense]({PAPER}), NeurIPS 2025.

```bibtex
@inproceedings{{movahedi2025fixedpoint,
  title = {{Fixed-Point RNNs: Interpolating from Diagonal to Dense}},
  author = {{Sajad Movahedi and Felix Sarnthein and Nicola Muca Cirone and Antonio Orvieto}},
  booktitle = {{Advances in Neural Information Processing Systems}},
  year = {{2025}},
  url = {{{PAPER}}}
}}
```"""


def _carries_code(model) -> bool:
    return type(model).__module__.startswith("lm.")  # else the model is one of transformers' own


def _snippet(model, has_tokenizer: bool) -> list[str]:
    trust = ", trust_remote_code=True" if _carries_code(model) else ""
    lines = ["```python"]
    if has_tokenizer:
        lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    else:
        lines += ["import torch", "from transformers import AutoModelForCausalLM"]
    lines += ["", HERE, f"model = AutoModelForCausalLM.from_pretrained(path{trust}).eval()"]
    if has_tokenizer:
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained(path{trust})",
            'ids = tokenizer("The following", return_tensors="pt")["input_ids"]',
            "print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))",
            "```",
        ]
        return lines
    lines += [
        "ids = torch.tensor([[1, 2, 3]])  # no tokenizer came with this model",
        "print(model.generate(ids, max_new_tokens=20))",
        "```",
    ]
    return lines


def with_place(text: str, repository: str) -> str:
    """The card whose snippet loads the model from the hub."""
    return text.replace(HERE, f'path = "{repository}"')


def _architecture(model, solved: bool) -> list[str]:
    c = model.config
    count = sum(p.numel() for p in model.parameters())
    lines = [f"- `{c.model_type}`, {count:,} parameters (fp32), {c.vocab_size:,} tokens."]
    if not hasattr(c, "d_model"):
        return lines
    lines.append(f"- {c.n_layer} layers of width {c.d_model}.")
    pattern = getattr(c, "layers", None)
    if pattern:
        lines.append(f"- Layers: `{pattern}`.")
    if solved:
        if not pattern:
            lines.append(f"- Each is `{c.block}`.")
        lines += [
            f"- Channel mixer `{c.mixer}` of rank {c.mixer_rank}, state size {c.d_state}.",
            f"- Solver: token `{c.token}`, schedule `{c.schedule}`, stopping `{c.stopping}`;"
            f" tolerance in evaluation `{c.eval_tol}`, at most {c.eval_max_iters:,} iterations;"
            f" gradient `{c.gradient}`. No weight depends on it: `model.solving(…)` takes another.",
        ]
    return lines


def _licence(licence: str | None, model) -> list[str]:
    weights = f"Weights: {licence}."
    if licence is None:
        weights = "Weights: whoever trained them has not said (`fprnn export --licence`)."
    code = "The code of fprnn in this folder: Apache-2.0."
    return [f"{weights} {code}" if _carries_code(model) else weights]


def _versions(model) -> list[str]:
    import torch
    import transformers

    lines = [
        f"- Needs {', '.join(f'`{needed}`' for needed in NEEDED)}; fprnn need not be installed.",
        f"- Written by fprnn {__version__} with Python {platform.python_version()}, torch"
        f" {torch.__version__}, transformers {transformers.__version__}.",
    ]
    if _carries_code(model):
        lines.append(
            "- Speed: where fprnn is installed its kernels are used, elsewhere those that came with"
            " the code; on a CPU g++ or clang++ compiles them at first use (up to a minute)."
            " Without a compiler fixed-point layers run in plain PyTorch, some 100 times slower."
        )
    return lines
