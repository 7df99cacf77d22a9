"""Run directory → HuggingFace directory."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lm.common.files import read_json, target, writing
from lm.export import travelling
from lm.export.folder import check_place, draft, publish, write_record
from lm.export.travelling import ExportError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lm.config.schema import Config
    from lm.export.model_card import Facts
    from lm.runs.run_dir import RunDir

__all__ = ["ExportError", "export", "write_export"]


def export(
    run_dir: Path,
    out: Path,
    checkpoint: Path | None = None,
    licence: str | None = None,
    trust: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write `out`: weights (fp32 safetensors), config, tokenizer, and the code, so that
    `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)` works without `lm`. A stack
    of Mamba alone is written as transformers' own class, without code.

    Args:
        checkpoint: which one; None takes the newest complete one.
        licence: of the weights, as the hub names it; None: not said.
        trust: run the code of a `module:Class` in the run's config.yaml.
        overwrite: replace an export of another run, too, or a card that was changed.
    Raises:
        CheckpointError: the run has no complete checkpoint.
        ExportError: `run_dir` holds no run, `out` holds something that is no export or is another
            run's, or the checkpoint is of another model than the run's config.yaml describes; a
            licence that is no name of one; weights whose
            teacher forcing and generation disagree (`check_decoding`).
        OutputError: `out` cannot be written.
    """
    from lm.export import model_card
    from lm.export.decoding import check_decoding
    from lm.runs.run_dir import RunDir
    from lm.training.foreign import as_transformers

    run, out = RunDir(run_dir), Path(out)
    _refuse_without_run(run)
    check_place(out, None, overwrite)
    check_licence(licence)
    trained = load_trained(run_dir, checkpoint, trust)
    check_decoding(trained.model)
    source = run_identity(trained.config)
    check_place(out, source, overwrite)
    facts = model_card.of_run(run, trained.config, trained.manifest)
    model = as_transformers(trained.model)
    return write_export(
        model,
        out,
        run.tokenizer,
        trained.name,
        trained.origin,
        facts,
        licence,
        source=source,
        overwrite=overwrite,
    )


def run_identity(cfg: Config) -> dict:
    """Return what tells two runs apart, wherever their directories lie: name, seed and a checksum
    of the settings that a resumed run may not change.

    Settings at their default are left out, so that a later version's new key changes nothing.
    """
    from lm.config.resuming import Resume, resume_rule
    from lm.runs.run_dir import comparable

    schema = type(cfg)
    defaults = comparable(schema())
    fixed = {
        key: value
        for key, value in sorted(comparable(cfg).items())
        if value != defaults.get(key)
        and resume_rule(schema, key) is Resume.FIXED
        and not key.endswith("path")
    }
    digest = hashlib.sha256(json.dumps(fixed).encode()).hexdigest()
    return {"name": cfg.name, "seed": cfg.seed, "settings": digest}


def check_licence(name: str | None) -> None:
    """Raises ExportError where it cannot be a licence's name on the hub."""
    if name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise ExportError(
            f"`{name}` is no name of a licence as the hub has them: lower case, such as apache-2.0,"
            " mit, cc-by-4.0 or other"
        )


class Trained(NamedTuple):
    """What a run has trained."""

    model: PreTrainedModel  # fp32, on the CPU, in training mode
    tokenizer: PreTrainedTokenizerBase
    name: str  # of the run
    origin: str  # sentences on where its weights come from
    config: Config
    manifest: dict  # of the checkpoint


def load_trained(run_dir: Path, checkpoint: Path | None = None, trust: bool = False) -> Trained:
    """The model of a run directory with the weights of a checkpoint; arguments and errors as those
    of `export`."""
    from lm.config.load import load
    from lm.config.plugin import reading_run
    from lm.data.corpus.tokenizer import load_tokenizer
    from lm.runs import checkpoint as checkpoints
    from lm.runs.run_dir import RunDir
    from lm.training.build import build_model, vocabulary
    from lm.training.reshard import consolidated
    from lm.training.resume import check_made_of

    run = RunDir(run_dir)
    _refuse_without_run(run)
    path = Path(checkpoint) if checkpoint else checkpoints.newest(run.checkpoints)
    if path is None:
        raise checkpoints.CheckpointError(f"{run} has no complete checkpoint to export")
    manifest = checkpoints.verify(path)
    cfg = load(run.config)
    check_made_of(path, manifest, run, cfg)
    tokenizer = load_tokenizer(cfg, run.path)
    ids = tokenizer.eos_token_id, tokenizer.pad_token_id
    with reading_run(run.config, trust):
        model = build_model(cfg, vocabulary(cfg, len(tokenizer)), *ids)
    weights = consolidated(path)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as e:
        first = str(e).partition("\n")[2].partition("\n")[0].strip().rstrip(".")
        raise ExportError(
            f"{path} is of another model than {run.config} describes ({first}): a"
            " run's config.yaml must stay as it was trained"
        ) from None
    origin = f"Trained with fprnn for {manifest['step']} updates."
    if run.init_from.is_file():
        began = read_json(run.init_from, ("path", "what"))
        origin += f" It began with weights of {Path(began['path']).name} ({began['what']})."
    return Trained(model, tokenizer, cfg.name, origin, cfg, manifest)


def _refuse_without_run(run: RunDir) -> None:
    if not run.holds_run:
        raise ExportError(f"{run} holds no run (it has no config.yaml)")


def write_export(
    model: PreTrainedModel,
    out: Path,
    tokenizer: Path | None,
    name: str,
    origin: str,
    facts: Facts | None = None,
    licence: str | None = None,
    source: dict | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model, its code if it is ours, the files of a tokenizer's folder and a model card.

    Args:
        origin: where the weights come from, in sentences. facts: of their training; None: they were
            not trained here. licence: of the weights, as the hub names it; None: not said.
            source: as `check_place`; None: of this name. overwrite: as `export`.
    Raises:
        ExportError: `out` holds something that is no export or is another's (an earlier export of
            the same source is replaced, and files that no export wrote stay), or the model has a
            mixer of its author's own that cannot travel.
        OutputError: `out` cannot be written.
    """
    from transformers.utils import logging

    from lm.data.corpus.tokenizer import RECORD
    from lm.export import measured, model_card
    from lm.model.checksums import SUMS, write_sums
    from lm.training.foreign import TOKENIZER

    logging.disable_progress_bar()
    out, source = Path(out), source or {"name": name}
    check_place(out, source, overwrite)
    own_files = {}
    if type(model).__module__.startswith("lm."):  # of this package, not of transformers
        own_files = travelling.flat_files(model)
        _map_auto_classes(model)
    with writing(out):
        out = target(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with draft(out) as folder:
        new = Path(folder) / "export"
        model.save_pretrained(new)
        for weights in new.glob("*.safetensors"):  # safetensors makes them for the user alone
            shutil.copymode(new / "config.json", weights)
        travelling.write(own_files, new)
        if (new / travelling.KERNELS).is_file():
            travelling.carry_kernels(new)
        for file in Path(tokenizer).iterdir() if tokenizer else ():
            if file.name not in (RECORD, SUMS):
                shutil.copy(file, new)
        _say_length(model, new / "tokenizer_config.json")
        if own_files:
            files = ", ".join(name for name in own_files if name != travelling.REGISTER)
            origin += f" Its mixer is its author's own and travels along: {files}."
        has_tokenizer = any((new / file).is_file() for file in TOKENIZER)
        card = model_card.card(model, name, origin, facts, has_tokenizer, licence)
        (new / measured.CARD).write_text(card, encoding="utf-8")
        # A card is to be written in, by people and by `fprnn eval`.
        write_sums(new, [file.name for file in new.iterdir() if file.name != measured.CARD])
        write_record(new, source)
        with writing(out):
            publish(new, out)
    return out


def _say_length(model: PreTrainedModel, settings: Path) -> None:
    """Have the tokenizer's settings, where there are any, name the model's length."""
    length = getattr(model.config, "max_position_embeddings", None)
    if length and settings.is_file():
        told = json.loads(settings.read_text(encoding="utf-8")) | {"model_max_length": length}
        settings.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _map_auto_classes(model: PreTrainedModel) -> None:
    """Have `save_pretrained` write the model's code, and name its classes for AutoConfig,
    AutoModel, AutoModelForCausalLM and AutoModelForSequenceClassification."""
    from lm.model.modeling_fprnn import FPRNNForSequenceClassification

    model.config.register_for_auto_class()
    type(model).register_for_auto_class("AutoModelForCausalLM")
    # These are in the same file as the model that is saved.
    others = {
        "AutoModel": type(model.base_model),
        "AutoModelForSequenceClassification": FPRNNForSequenceClassification,
    }
    file = type(model).__module__.rpartition(".")[2]
    model.config.auto_map = {auto: f"{file}.{cls.__name__}" for auto, cls in others.items()}
