"""Loading the model of a run directory with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lm.config.plugin import TRUST_ADVICE, guard_imports
from lm.config.schema import Config
from lm.runs import checkpoint as checkpoints
from lm.runs.run_dir import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Trained(NamedTuple):
    """A trained model and its run."""

    model: PreTrainedModel  # fp32, on the CPU, in training mode
    tokenizer: PreTrainedTokenizerBase
    config: Config  # of the run
    manifest: dict  # of the checkpoint
    path: Path  # folder of the checkpoint


def load_trained(
    run_dir: Path, checkpoint: Path | None = None, trust: bool = False, advice: str = TRUST_ADVICE
) -> Trained:
    """Load the model of a run directory.

    Args:
        run_dir: Run directory.
        checkpoint: Folder of a checkpoint of the run; None: the newest complete checkpoint.
        trust: True to run the code of a `module:Class` in the run's config.yaml.
        advice: Advice in the error message if such code is needed and not trusted.

    Raises:
        CheckpointError: If the folder holds no run or no complete checkpoint, or the checkpoint is
            damaged or does not fit config.yaml.
        RunDirError: If the tokenizer, a corpus or the config has changed since the checkpoint.
    """
    import torch

    from lm.config.load import build, load_tree
    from lm.data.corpus.tokenizer import load_tokenizer
    from lm.training.build import build_model, model_vocab_size
    from lm.training.reshard import consolidate_weights
    from lm.training.resume import check_fingerprint

    run = RunDir(run_dir)
    if not run.holds_run:
        raise checkpoints.CheckpointError(f"{run} holds no run (it has no config.yaml)")
    path = Path(checkpoint) if checkpoint else checkpoints.find_newest_checkpoint(run.checkpoints)
    if path is None:
        raise checkpoints.CheckpointError(f"{run} has no complete checkpoint")
    manifest = checkpoints.verify(path)
    cfg = build(load_tree(run.config), str(run.config), Config, trained=True)
    check_fingerprint(path, manifest, run, cfg)
    tokenizer = load_tokenizer(cfg, run.path)
    vocab_size = model_vocab_size(cfg, len(tokenizer))
    with guard_imports(run.config, trust, advice), torch.random.fork_rng(devices=[]):
        model = build_model(cfg, vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id)
    weights = consolidate_weights(path)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as e:
        raise checkpoints.CheckpointError(
            f"the weights in {path} do not fit the model of {run.config} ({first_mismatch(e)}):"
            " restore the config.yaml of the training"
        ) from None
    return Trained(model, tokenizer, cfg, manifest, path)


def first_mismatch(error: RuntimeError) -> str:
    """Return the first mismatch that an error of `load_state_dict` lists after its heading."""
    return str(error).partition("\n")[2].partition("\n")[0].strip().rstrip(".")
