"""`init_from`: a training that starts from the weights of another model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.errors import ConfigError
from lm.common.ranks import Ranks
from lm.config.model import InitFrom
from lm.config.schema import Config
from lm.runs.run_dir import RunDir
from lm.training import foreign, upcycle
from lm.training.foreign import Source, SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OWN_CODE_ADVICE = "the configuration that you pass must name it as well, which imports it"


def read(path: str | Path, shapes_only: bool = False) -> Source:
    """Read the language model in a folder.

    Args:
        path: One of our runs (its newest checkpoint) or checkpoints, an export, or a Mamba of
            transformers.
        shapes_only: Leave the weights on the meta device where that saves time.

    Raises:
        SourceError: If there is no such folder, or it holds none of these.
        CheckpointError, RunDirError, LoadError: If a run or an export is damaged, or was changed.
    """
    from lm.model.configuration_fprnn import MODEL_TYPES
    from lm.runs.checkpoint import MANIFEST
    from lm.runs.exported import load_model

    path = Path(path).expanduser()
    foreign.check_source_folder(path)
    if RunDir(path).holds_run:
        return _read_run(RunDir(path), None, shapes_only)
    if (path / MANIFEST).is_file():
        return _read_run(RunDir(path.parent.parent), path, shapes_only)
    if foreign.model_type(path) not in MODEL_TYPES:
        return foreign.read_folder(path, shapes_only)
    model = load_model(path)
    weights = foreign.source_weights(model.state_dict(), model.config, path)
    tokenizer = foreign.tokenizer_folder(path)
    return Source(path, "our export", model.config, weights, tokenizer)


def _read_run(run: RunDir, checkpoint: Path | None, shapes_only: bool) -> Source:
    """Read a checkpoint of a run; None: the newest."""
    from lm.training.trained import load_trained

    if not run.holds_run:
        raise SourceError(f"{checkpoint} is no checkpoint of a run: {run} has no config.yaml")
    if not run.tokenizer.is_dir():
        raise SourceError(f"{run} has no tokenizer: it was never trained")
    trained = load_trained(
        run.path,
        checkpoint,
        advice=OWN_CODE_ADVICE,
        shapes_only=shapes_only,
    )
    model, path = trained.model, trained.path
    weights = foreign.source_weights(model.state_dict(), model.config, path)
    what = f"our run, update {trained.manifest['step']}"
    return Source(path, what, model.config, weights, run.tokenizer)


def goes_on(cfg: Config) -> bool:
    """Whether the run goes on from a checkpoint of its own, and so reads nothing of `init_from`.

    Raises:
        ConfigError: `resume` names a checkpoint of another run.
    """
    from lm.runs.checkpoint import listed

    own = RunDir(cfg.run_dir).checkpoints
    if cfg.resume in ("never", "auto"):
        return cfg.resume == "auto" and bool(listed(own))
    if Path(cfg.resume).resolve().parent != own.resolve():
        raise ConfigError(
            f"init_from and resume ({cfg.resume}) both say where the weights come from: leave one"
            " of them out (init_from=null, or resume=never)"
        )
    return True


def check(cfg: Config, model: PreTrainedModel) -> list[str]:
    """Refuse, before anything trains, what cannot be started from → what would be taken, in words.

    Args:
        model: of the config, on the meta device, of any vocabulary.
    Raises:
        ConfigError: the run itself, another checkpoint to resume, a model that does not
            match. SourceError, CheckpointError, LoadError: as `read`.
    """
    if cfg.init_from is None:
        return []
    wanted = cfg.init_from
    own = Path(cfg.run_dir).resolve()
    if Path(wanted.path).expanduser().resolve().is_relative_to(own):
        raise ConfigError(
            f"init_from.path is {wanted.path}, which is this run's own: choose another `name`, or"
            " continue it with resume=auto"
        )
    if goes_on(cfg):
        return [f"{wanted.path}: not read, the run goes on from its own checkpoint"]
    tokens = cfg.model.vocab_size
    source = read(wanted.path, shapes_only=True)
    found = upcycle.match(source, model, wanted.partial, None if tokens == "auto" else tokens)
    lines = upcycle.described(found, source, model.config)
    if tokens == "auto":
        there = source.config.vocab_size
        lines.append(f"its vocabulary is of {there} tokens: compared when the run has its own")
    return lines


def begin(
    cfg: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    run: RunDir,
) -> None:
    """Give a new run's model the weights of `init_from`, where there is one, and write down what
    was taken. Every rank reads them.

    Raises:
        as `check`; ConfigError: a source of another tokenizer.
    """
    if cfg.init_from is not None:
        ranks.run_on_all(_begin, cfg.init_from, model, tokenizer, ranks.is_main, run)


def _begin(
    wanted: InitFrom,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    is_main: bool,
    run: RunDir,
) -> None:
    from lm.common.console import say
    from lm.common.files import write_json

    source = read(wanted.path)
    other_tokens = _other_tokens(source, tokenizer)
    found = upcycle.match(source, model, wanted.partial, model.config.vocab_size, other_tokens)
    upcycle.apply(found, source, model)
    for line in upcycle.described(found, source, model.config):
        say(f"init     {line}")
    if is_main:
        write_json(run.init_from, upcycle.record(found, source, model.config))


def _other_tokens(source: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the difference of a source's tokenizer from the run's, in words; "" if every token of
    it has the same number here, or the source has no tokenizer."""
    from lm.runs.exported import load_tokenizer

    if source.tokenizer is None:
        return ""
    theirs, ours = load_tokenizer(source.tokenizer).get_vocab(), tokenizer.get_vocab()
    others = theirs.items() - ours.items()
    if not others:
        return ""
    return (
        f"its tokenizer is another: {len(others)} of its {len(theirs)} tokens have another number"
        f" here, or none; tokenizer.name={source.tokenizer} is its own"
    )
