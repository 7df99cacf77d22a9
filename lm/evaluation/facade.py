"""`fprnn.load(PATH)`: a trained model to generate, score and look inside with, in Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.common.errors import UserError
from lm.runs import places

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lm.evaluation.inspection.result import Inspection, Score


class FacadeError(UserError, RuntimeError):
    """A run that no language model can be loaded from; the message says what is there."""


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
    """Load the language model of a run, of an export or of a name on the hub.

    It lies on a GPU if there is one.

    Args:
        path: A run directory (its newest complete checkpoint), an exported or any
            `from_pretrained` folder, or a name on the hub.
        trust: Run the code of a `module:Class` in a run's config.yaml, or that an exported folder
            brings along where its mixer is its author's own; code from the hub never runs.

    Raises:
        PlaceError: Nothing there, or a file.
        FacadeError: A run of the synthetic suite.
        GenerationError: A folder without a tokenizer.
        LoadError: Damaged files.
        CheckpointError: A run without a complete checkpoint.
        ExportError: A checkpoint that the run's config.yaml does not describe.
    """
    folder = Path(path).expanduser()
    kind = places.find_model(path)
    if kind == "run":
        return _of_run(folder, trust)

    from lm.evaluation.generate import load_exported

    model, tokenizer = load_exported(folder if kind == "export" else path, trust)
    name = folder.resolve().name if kind == "export" else str(path)
    return LanguageModel(model, tokenizer, name)


def generate(path: Path | str, prompt: str, trust: bool = False, **options: Any) -> str:
    """Return the prompt and its continuation.

    Args:
        path: A run directory, an exported folder or a name on the hub.
        prompt: Text of at least one character.
        trust: Run the code that a directory brings along where it has a mixer of its own.
        options: Fields of Sampling.

    Raises:
        GenerationError: A number out of its range, an empty prompt, or `solving` refuses.
        PlaceError, LoadError, CheckpointError: As `load`.
    """
    from lm.evaluation.generate import Sampling

    Sampling(**options)  # refuses a number before the model is loaded
    return load(path, trust).generate(prompt, **options)


def _of_run(folder: Path, trust: bool) -> LanguageModel:
    """Load the model of a run directory."""
    _refuse_synthetic(folder)

    import torch

    from lm.training.trained import load_trained

    trained = load_trained(folder, trust=trust)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LanguageModel(trained.model.to(device), trained.tokenizer, trained.config.name)


def _refuse_synthetic(folder: Path) -> None:
    from lm.config.yaml_text import load_tree

    if "task" in load_tree(folder / places.RUN_FILE):
        raise FacadeError(
            f"{folder} is a run of the synthetic suite, whose tokens are no text: `fprnn synthetic"
            f" inspect {folder}` looks inside it"
        )
