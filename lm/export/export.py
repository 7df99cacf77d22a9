"""Export of a run, or of any model, as a HuggingFace model folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.files import read_json, resolve_link, writing
from lm.export.export_code import (
    ExportError,
    find_custom_mixers,
    flatten_mixer_files,
    write_kernels,
    write_mixers,
)
from lm.export.folder import check_out_folder, draft_folder, publish, write_record

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
    """Write the weights (fp32 safetensors), config, tokenizer and code of a run to a folder.

    `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)` then works without fprnn.

    Args:
        run_dir: Directory of the run.
        out: Folder to write.
        checkpoint: A checkpoint folder of the run; None: the newest complete one.
        licence: Licence of the weights by its name on the hub; None: unknown.
        trust: True to run the code of a `module:Class` in the run's config.yaml.
        overwrite: True to replace the export of another run, and a model card that was edited.

    Returns:
        The written folder.

    Raises:
        CheckpointError: If the run has no complete checkpoint, or the checkpoint does not fit the
            run's config.yaml.
        ExportError: If `run_dir` is no run, `out` is not empty and no export of this run, or
            teacher forcing and generation disagree (`check_decoding`).
        OutputError: If `out` cannot be written.
    """
    from lm.export import model_card
    from lm.export.decoding import check_decoding
    from lm.runs.run_dir import RunDir
    from lm.training.trained import load_trained

    run, out = RunDir(run_dir), Path(out)
    if not run.holds_run:
        raise ExportError(f"{run} holds no run (it has no config.yaml)")
    check_out_folder(out, None, overwrite)  # before loading, which takes long
    trained = load_trained(run_dir, checkpoint, trust)
    check_decoding(trained.model)
    source = identify_run(trained.config)
    check_out_folder(out, source, overwrite)
    origin = f"Trained with fprnn for {trained.manifest['step']} updates."
    if run.init_from.is_file():
        init = read_json(run.init_from, ("path", "what"))
        init_name = Path(init["path"]).name
        origin += f" Training started from the weights of {init_name} ({init['what']})."
    return write_export(
        trained.model,
        out,
        tokenizer=run.tokenizer,
        name=trained.config.name,
        origin=origin,
        facts=model_card.read_facts(run, trained.config, trained.manifest),
        licence=licence,
        source=source,
        overwrite=overwrite,
    )


def identify_run(cfg: Config) -> dict:
    """Return the name, the seed and a checksum of the settings that a resumed run may not change.

    Two runs with equal values count as the same run, wherever their directories are. The checksum
    leaves out settings with their default value, so that keys added by later versions do not change
    it.
    """
    from lm.config.resuming import Resume, resume_rule
    from lm.runs.run_dir import flatten_config

    schema = type(cfg)
    defaults = flatten_config(schema())
    fixed_settings = {
        key: value
        for key, value in flatten_config(cfg).items()
        if value != defaults.get(key)
        and resume_rule(schema, key) is Resume.FIXED
        and not key.endswith("path")  # paths differ between machines
    }
    digest = hashlib.sha256(json.dumps(fixed_settings, sort_keys=True).encode()).hexdigest()
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
    """Write a model, its code, its tokenizer and a model card to a folder.

    It replaces an earlier export of the same source, and keeps files that no export wrote.

    Args:
        model: Model of this package.
        out: Folder to write.
        tokenizer: Folder of the tokenizer; None: write no tokenizer.
        name: Title of the model card.
        origin: Sentences on the origin of the weights, for the model card.
        facts: Facts about the training, for the model card; None: unknown.
        licence: Licence of the weights by its name on the hub; None: unknown.
        source: The exported run, as `identify_run` describes it; None: only its name.
        overwrite: As in `export`.

    Returns:
        The written folder.

    Raises:
        ExportError: If `out` is not empty and no export of this source, or a custom mixer cannot
            be exported.
        OutputError: If `out` cannot be written.
    """
    from transformers.utils import logging

    from lm.export import model_card
    from lm.model.checksums import write_sums
    from lm.runs.owned_files import CARD

    logging.disable_progress_bar()
    out, source = Path(out), source or {"name": name}
    check_out_folder(out, source, overwrite)
    mixers = find_custom_mixers(model)
    mixer_files = flatten_mixer_files(mixers)
    if mixer_files:
        origin += f" It has a custom mixer, defined in {', '.join(mixer_files)} of this folder."
    card = model_card.format_card(model, name, origin, facts, licence)
    with writing(out):  # turns errors of the file system into OutputError
        out = resolve_link(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(out) as draft:
        new = draft / "export"
        _write_model(model, new)
        write_mixers(new, mixers, mixer_files)
        write_kernels(new)
        _copy_tokenizer(tokenizer, new, model)
        (new / CARD).write_text(card, encoding="utf-8")
        # The card has no checksum, because people edit it.
        write_sums(new, [file.name for file in new.iterdir() if file.name != CARD])
        write_record(new, source)
        with writing(out):
            publish(new, out)
    return out


def _write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights, the configuration and the files of lm/model."""
    _map_auto_classes(model)
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # safetensors lets only the user read them
        shutil.copymode(folder / "config.json", weights)


def _copy_tokenizer(tokenizer: Path | None, folder: Path, model: PreTrainedModel) -> None:
    """Copy the tokenizer's files, and set its `model_max_length` to the model's length."""
    from lm.data.corpus.tokenizer import RECORD
    from lm.model.checksums import SUMS

    for file in Path(tokenizer).iterdir() if tokenizer else ():
        if file.name not in (RECORD, SUMS):
            shutil.copy(file, folder)
    settings_file = folder / "tokenizer_config.json"
    length = getattr(model.config, "max_position_embeddings", None)
    if length and settings_file.is_file():
        settings = json.loads(settings_file.read_text(encoding="utf-8"))
        settings["model_max_length"] = length
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        settings_file.write_text(text, encoding="utf-8")


def _map_auto_classes(model: PreTrainedModel) -> None:
    """Make `save_pretrained` write the model's code, and `auto_map` in config.json.

    `auto_map` names the class that each Auto class of transformers loads.
    """
    from lm.model.modeling_fprnn import FPRNNForSequenceClassification

    model.config.register_for_auto_class()
    type(model).register_for_auto_class("AutoModelForCausalLM")
    # These classes are in the same file as the model.
    classes = {
        "AutoModel": type(model.base_model),
        "AutoModelForSequenceClassification": FPRNNForSequenceClassification,
    }
    module = type(model).__module__.rpartition(".")[2]
    model.config.auto_map = {auto: f"{module}.{cls.__name__}" for auto, cls in classes.items()}
