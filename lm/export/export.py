"""Run directory → HuggingFace directory."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.files import read_json, resolve_link, writing
from lm.export.export_code import (
    ExportError,
    mixer_files,
    own_mixers,
    write_kernels,
    write_mixers,
)
from lm.export.folder import check_place, draft, publish, write_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lm.config.schema import Config
    from lm.export.model_card import Facts

__all__ = ["ExportError", "export", "write_export"]


def export(
    run_dir: Path,
    out: Path,
    checkpoint: Path | None = None,
    licence: str | None = None,
    trust: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write weights (fp32 safetensors), config, tokenizer and code to `out`.

    `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)` then works without `lm`.

    Args:
        run_dir: The run's folder.
        out: Folder of the export.
        checkpoint: One of the run's checkpoints; None: the newest complete one.
        licence: Licence of the weights, as the hub names it; None: not known.
        trust: Run the code of a `module:Class` in the run's config.yaml.
        overwrite: Replace an export of another run, and a card that was changed.

    Raises:
        CheckpointError: If the run has no complete checkpoint, or one of another model than its
            config.yaml describes.
        ExportError: If `run_dir` holds no run, `out` holds something that is no export or is
            another run's, or teacher forcing and generation disagree (`check_decoding`).
        OutputError: If `out` cannot be written.
    """
    from lm.export import model_card
    from lm.export.decoding import check_decoding
    from lm.runs.run_dir import RunDir
    from lm.training.trained import load_trained

    run, out = RunDir(run_dir), Path(out)
    if not run.holds_run:
        raise ExportError(f"{run} holds no run (it has no config.yaml)")
    check_place(out, None, overwrite)
    trained = load_trained(run_dir, checkpoint, trust)
    check_decoding(trained.model)
    source = run_identity(trained.config)
    check_place(out, source, overwrite)
    origin = f"Trained with fprnn for {trained.manifest['step']} updates."
    if run.init_from.is_file():
        start = read_json(run.init_from, ("path", "what"))
        origin += f" It began with weights of {Path(start['path']).name} ({start['what']})."
    return write_export(
        trained.model,
        out,
        run.tokenizer,
        trained.config.name,
        origin,
        model_card.of_run(run, trained.config, trained.manifest),
        licence,
        source=source,
        overwrite=overwrite,
    )


def run_identity(cfg: Config) -> dict:
    """Return the name, the seed and a checksum of the settings that a resumed run may not change.

    They tell two runs apart, wherever their directories lie. Settings at their default are left
    out, so that a later version's new key changes nothing; keys have their first names, so that
    renaming one changes nothing either.
    """
    from lm.config.old_keys import with_first_names
    from lm.config.resuming import Resume, resume_rule
    from lm.runs.run_dir import comparable

    schema = type(cfg)
    defaults = comparable(schema())
    fixed = {
        key: value
        for key, value in comparable(cfg).items()
        if value != defaults.get(key)
        and resume_rule(schema, key) is Resume.FIXED
        and not key.endswith("path")
    }
    named = dict(sorted(with_first_names(fixed).items()))
    digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()
    return {"name": cfg.name, "seed": cfg.seed, "settings": digest}


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

    An earlier export of the same source is replaced; files that no export wrote stay.

    Args:
        model: The model.
        out: Folder of the export.
        tokenizer: Folder of the tokenizer; None: there is none.
        name: Title of the card.
        origin: Origin of the weights, in sentences.
        facts: Facts of their training; None: not known.
        licence: Licence of the weights, as the hub names it; None: not known.
        source: As `check_place`; None: of this name.
        overwrite: As `export`.

    Raises:
        ExportError: If `out` holds something that is no export or is another's, or the model has a
            mixer of the user's that cannot travel.
        OutputError: If `out` cannot be written.
    """
    from transformers.utils import logging

    from lm.data.corpus.tokenizer import RECORD
    from lm.export import model_card
    from lm.model.checksums import SUMS, write_sums
    from lm.runs.written import CARD

    logging.disable_progress_bar()
    out, source = Path(out), source or {"name": name}
    check_place(out, source, overwrite)
    mixers = own_mixers(model)
    own_files = mixer_files(mixers)
    if own_files:
        origin += f" Its mixer is its author's own and travels along: {', '.join(own_files)}."
    with writing(out):
        out = resolve_link(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with draft(out) as folder:
        new = folder / "export"
        _map_auto_classes(model)
        model.save_pretrained(new)
        for weights in new.glob("*.safetensors"):  # safetensors makes them for the user alone
            shutil.copymode(new / "config.json", weights)
        write_mixers(new, mixers, own_files)
        write_kernels(new)
        for file in Path(tokenizer).iterdir() if tokenizer else ():
            if file.name not in (RECORD, SUMS):
                shutil.copy(file, new)
        _write_length(model, new / "tokenizer_config.json")
        card = model_card.card(model, name, origin, facts, licence)
        (new / CARD).write_text(card, encoding="utf-8")
        # People and `fprnn eval` write into the card, so it has no checksum.
        write_sums(new, [file.name for file in new.iterdir() if file.name != CARD])
        write_record(new, source)
        with writing(out):
            publish(new, out)
    return out


def _write_length(model: PreTrainedModel, settings: Path) -> None:
    """Write the model's length into the tokenizer's settings, if there are any."""
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
