"""`fprnn.load(PATH)`: a trained model to generate, score and look inside with, in Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.common.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lm.evaluation.inspection.page import Inspection
    from lm.evaluation.inspection.result import Score
    from lm.runs.run_dir import RunDir


class FacadeError(UserError, RuntimeError):
    """A place that no language model can be loaded from; the message says what is there."""


class LanguageModel:
    """A trained language model and its tokenizer, in evaluation mode.

    Attributes:
        model: the PreTrainedModel itself, in fp32 where it is of a run directory, else as saved.
        tokenizer: its tokenizer. name: of the folder, or on the hub.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name

    def generate(self, prompt: str, **options: Any) -> str:
        """The prompt and its continuation, as `fprnn generate` prints it.

        Args:
            options: fields of generate.Sampling: max_new_tokens (64), temperature (0.8; 0 is
            greedy decoding), top_k (50; 0: all), seed (0), and schedule, tol, max_iters: how a
            fixed-point model is solved.
        Raises:
            GenerationError: a number out of its range, an empty prompt, or a solver setting that
                the model has not. TypeError: no such option.
        """
        from lm.evaluation.generate import Sampling, continued

        return continued(self.model, self.tokenizer, prompt, Sampling(**options))

    def score(self, text: str) -> Score:
        """How likely the model finds a text: the log-probability of each token in nats, and from
        these loss (nats a token), perplexity and bits per byte. The text is read after one BOS or
        EOS token, as lm-eval reads it, so its first token counts too.

        Raises:
            InspectionError: an empty text, no Unicode, or more than evaluation reads at once.
        """
        from lm.evaluation.inspection.measure import score_text

        return score_text(self.model, self.tokenizer, text)

    def inspect(self, text: str) -> Inspection:
        """What the model makes of a text: loss, entropy and likeliest predictions of each token,
        and of each layer that is solved ℓ* of each token, the state's norm, the mixer's gate, the
        decay. A notebook shows the result as a page; `.to_html(path)` writes that page.

        Raises:
            InspectionError: as `score`.
        """
        from lm.evaluation.inspection.measure import inspect_text

        return inspect_text(self.model, self.tokenizer, text, self.name)

    def __repr__(self) -> str:
        from lm.evaluation.inspection.measure import in_words

        return f"{type(self).__name__}({self.name}: {in_words(self.model)})"


def load(path: Path | str, trust: bool = False) -> LanguageModel:
    """The language model of a run directory (its newest complete checkpoint), of an exported or any
    `from_pretrained` folder, or of a name on the hub; on a GPU if there is one.

    Args:
        trust: run the code of a `module:Class` in a run's config.yaml, or that an exported folder
            brings along where its mixer is its author's own; code from the hub never runs.
    Raises:
        FacadeError: nothing there, a file, or a run of the synthetic suite. GenerationError: a
            folder without a model or a tokenizer. LoadError: damaged files. CheckpointError: a run
            without a complete checkpoint. ExportError: one that its config.yaml does not describe.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        raise FacadeError(f"{path} is a file: give the run directory or the exported folder")
    is_export = (folder / "config.json").is_file()  # read without what only runs need
    if folder.is_dir() and not is_export and (trained := _of_run(folder, trust)):
        return trained

    from lm.evaluation.generate import load_exported

    model, tokenizer = load_exported(folder if folder.is_dir() else path, trust)
    name = folder.resolve().name if folder.is_dir() else str(path)
    return LanguageModel(model, tokenizer, name)


def _of_run(folder: Path, trust: bool) -> LanguageModel | None:
    """The model of a run directory; None where no run is."""
    import torch

    from lm.export.export import load_trained
    from lm.runs.run_dir import RunDir

    run = RunDir(folder)
    if not run.holds_run:
        return None
    _refuse_synthetic(run)
    trained = load_trained(folder, trust=trust)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LanguageModel(trained.model.to(device), trained.tokenizer, trained.name)


def _refuse_synthetic(run: RunDir) -> None:
    from lm.config.yaml_text import load_tree

    if "task" in load_tree(run.config):
        raise FacadeError(
            f"{run} is a run of the synthetic suite, whose tokens are no text: `fprnn synthetic"
            f" inspect {run}` looks inside it"
        )
