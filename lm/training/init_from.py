"""Start a training run from the weights of another model: the configuration key `init_from`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.errors import ConfigError
from lm.common.ranks import Ranks
from lm.config.schema import Config
from lm.runs.run_dir import RunDir
from lm.training import hf_mamba
from lm.training.inputs import check_source_folder
from lm.training.upcycle import HEAD, SourceError, SourceModel, match_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Advice if the source's config.yaml names a mixer of the user (`module:Class`).
CODE_ADVICE = "the configuration that you pass must name it as well, which imports it"


def read_source(path: str | Path) -> SourceModel:
    """Read the language model in a folder.

    Args:
        path: A run of ours (its newest checkpoint is read), a checkpoint, an export, or a Mamba in
            transformers' format.

    Raises:
        SourceError: If the folder is missing, or holds no such model.
        CheckpointError, RunDirError, LoadError: If its files are damaged or were changed.
    """
    from lm.common.files import read_mapping
    from lm.model.configuration_fprnn import MODEL_TYPES
    from lm.runs.checkpoint import MANIFEST
    from lm.runs.exported import load_model

    path = Path(path).expanduser()
    check_source_folder(path)
    if (path / MANIFEST).is_file():  # a checkpoint, in RUN/checkpoints
        return _read_run(RunDir(path.parent.parent), checkpoint=path)
    if (run := RunDir(path)).holds_run:
        return _read_run(run, checkpoint=None)
    tokenizer = path if any(path.glob("tokenizer*")) else None
    if (read_mapping(path / "config.json") or {}).get("model_type") not in MODEL_TYPES:
        return hf_mamba.read_folder(path)._replace(tokenizer=tokenizer)
    model = load_model(path)
    return SourceModel(path, "our export", model.config, untied_weights(model), tokenizer)


def _read_run(run: RunDir, checkpoint: Path | None) -> SourceModel:
    """Read a checkpoint of a run; None: the newest."""
    from lm.training.trained import load_trained

    if not run.tokenizer.is_dir():
        raise SourceError(f"{run} is no trained run: it has no tokenizer")
    trained = load_trained(run.path, checkpoint, advice=CODE_ADVICE)
    description = f"our run, update {trained.manifest['step']}"
    weights = untied_weights(trained.model)
    return SourceModel(trained.path, description, trained.model.config, weights, run.tokenizer)


def untied_weights(model: PreTrainedModel) -> dict:
    """Return the state dict without the head if it is tied to the embedding."""
    weights = dict(model.state_dict())
    if model.config.tie_embeddings:
        del weights[HEAD]
    return weights


def check(cfg: Config, model: PreTrainedModel) -> list[str]:
    """Refuse an `init_from` that a run cannot start from, before the training starts.

    Args:
        cfg: Configuration of the run.
        model: Model of the run on the meta device, with any vocabulary.

    Returns:
        Lines for the log that describe the weights that the run will take.

    Raises:
        ConfigError: If the source belongs to the run itself or does not match the model, or if
            `resume` names a checkpoint of another run.
        SourceError, CheckpointError, RunDirError, LoadError: As `read_source`.
    """
    from lm.runs.checkpoint import list_checkpoints

    if cfg.init_from is None:
        return []
    path, checkpoints = cfg.init_from.path, RunDir(cfg.run_dir).checkpoints
    if Path(path).expanduser().resolve().is_relative_to(Path(cfg.run_dir).resolve()):
        raise ConfigError(
            f"init_from.path is {path}, which belongs to this run: choose another `name`, or"
            " continue the run with resume=auto"
        )
    resumes_by_path = cfg.resume not in ("never", "auto")
    if resumes_by_path and Path(cfg.resume).expanduser().resolve().parent != checkpoints.resolve():
        raise ConfigError(
            f"init_from and resume ({cfg.resume}) name two sources of the weights: remove one"
            " (init_from=null, or resume=never)"
        )
    if resumes_by_path or (cfg.resume == "auto" and list_checkpoints(checkpoints)):
        return [f"{path}: not read, because the run continues from its own checkpoint"]
    vocab_size = None if cfg.model.vocab_size == "auto" else cfg.model.vocab_size
    source = read_source(path)
    lines = match_weights(source, model, cfg.init_from.partial, vocab_size).describe()
    if vocab_size is None:
        size = source.config.vocab_size
        lines.append(f"its vocabulary of {size} tokens is compared when the run starts")
    return lines


def initialize(
    cfg: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    run: RunDir,
) -> None:
    """Copy the weights of `init_from`, if it is set, into a new run's model, on every rank.

    The main rank writes init_from.json.

    Raises:
        ConfigError: As `check`; or if the source has another tokenizer.
        SourceError, CheckpointError, RunDirError, LoadError: As `read_source`.
    """
    from lm.common.console import say
    from lm.common.files import write_json

    options = cfg.init_from
    if options is None:
        return

    def copy_weights() -> None:
        source = read_source(options.path)
        match = match_weights(
            source,
            model,
            options.partial,
            vocab_size=model.config.vocab_size,
            token_difference=compare_tokenizers(source, tokenizer),
        )
        match.apply()
        for line in match.describe():
            say(f"init     {line}")
        if ranks.is_main:
            write_json(run.init_from, match.record())

    ranks.run_on_all(copy_weights)


def compare_tokenizers(source: SourceModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a message if tokens of the source have other ids in the run's tokenizer, else "".

    It is also "" if the source has no tokenizer.
    """
    from lm.runs.exported import load_tokenizer

    if source.tokenizer is None:
        return ""
    vocab = load_tokenizer(source.tokenizer).get_vocab()
    changed = vocab.items() - tokenizer.get_vocab().items()  # pairs (token, id)
    if not changed:
        return ""
    return (
        f"its tokenizer differs: {len(changed)} of its {len(vocab)} tokens have another id in this"
        f" run, or none; tokenizer.name={source.tokenizer} is the source's"
    )
