"""`fprnn.load(PATH)`: load a trained language model, to generate and inspect text with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.errors import UserError
from lm.runs.path_checks import RUN_FILE, check_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lm.evaluation.inspection.page import Inspection

MIN_TEMPERATURE = 1e-3  # logits divided by a smaller number may be infinite


class LanguageModelError(UserError, RuntimeError):
    """Model or prompt that cannot be used; the message has the reason and a fix."""


class LanguageModel:
    """A trained language model and its tokenizer, in evaluation mode.

    Attributes:
        model: The PreTrainedModel, in fp32 if it was loaded from a run directory, otherwise in the
            dtype in which it was saved.
        tokenizer: The tokenizer of the model.
        name: Name of the run, of the folder, or on the hub.
        step: Number of updates of the checkpoint; None if the model is not from a run directory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        step: int | None = None,
    ):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.step = step

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 0,
    ) -> str:
        """Return the prompt with its continuation, as `fprnn generate` prints it.

        Args:
            prompt: Text of at least one character.
            max_new_tokens: Maximum number of tokens to append, at least 1.
            temperature: Sampling temperature of at least 0.001, or 0 for greedy decoding.
            top_k: Number of most likely tokens to sample from; 0: all tokens.
            seed: Sampling seed.

        Raises:
            LanguageModelError: If the prompt is empty or not Unicode, or the temperature is
                neither 0 nor at least 0.001.
            ValueError: If transformers refuses another option.
        """
        import torch

        from lm.model.configuration_fprnn import MODEL_TYPES

        if temperature != 0 and not temperature >= MIN_TEMPERATURE:  # also refuses NaN
            raise LanguageModelError(
                f"temperature is {temperature:g}: it must be 0 (greedy) or at least"
                f" {MIN_TEMPERATURE:g}"
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as e:  # bytes of a command line that are not UTF-8
            raise LanguageModelError(
                f"the prompt is not text: character {e.start} is not UTF-8"
            ) from None
        inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        if inputs["input_ids"].shape[1] == 0:
            raise LanguageModelError("the prompt is empty: give at least one character")
        options: dict = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": top_k}
        if self.model.config.model_type in MODEL_TYPES:  # a model of this package
            options["use_cache"] = True  # even if its generation_config.json disables the cache
        pad_token_id = self.tokenizer.pad_token_id
        if pad_token_id is None:
            pad_token_id = self.tokenizer.eos_token_id
        torch.manual_seed(seed)
        output_ids = self.model.generate(
            **inputs.to(self.model.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_token_id,
            **options,
        )
        return self.tokenizer.decode(output_ids[0], skip_special_tokens=True)

    def inspect(self, text: str) -> Inspection:
        """Measure loss, entropy and predictions of each token, and ℓ*, states and gates of layers.

        The model reads a BOS token before the text (an EOS token if the tokenizer has no BOS), as
        in lm-eval. A notebook displays the result as a page, and `.to_html(path)` writes the page.

        Raises:
            InspectionError: If the text is empty, not Unicode, or longer than
                `max_position_embeddings`.
        """
        from lm.evaluation.inspection.measure import inspect_text

        return inspect_text(self.model, self.tokenizer, text, self.name)

    def __repr__(self) -> str:
        from lm.evaluation.inspection.measure import describe_model

        return f"{type(self).__name__}({self.name}: {describe_model(self.model)})"


def load(path: Path | str, trust: bool = False) -> LanguageModel:
    """Load a language model, on the GPU if there is one.

    Args:
        path: A run directory (its newest complete checkpoint), an export or another folder for
            `from_pretrained`, or a name on the hub.
        trust: True to run code that comes with the model: a `module:Class` in the run's
            config.yaml, or the code of an export with a custom mixer. Code from the hub never runs.

    Raises:
        PathError: If `path` does not exist, or is a file.
        LanguageModelError: If it is a run of the synthetic suite, or has no tokenizer.
        LoadError: If files are damaged.
        CheckpointError: If the run has no complete checkpoint, or the checkpoint does not fit the
            run's config.yaml.
    """
    folder = Path(path).expanduser()
    kind, step = check_model(path), None
    if kind == "run":
        _refuse_synthetic(folder)
        from lm.training.trained import load_trained

        trained = load_trained(folder, trust=trust)
        model, tokenizer, name = trained.model, trained.tokenizer, trained.config.name
        step = trained.manifest["step"]
    elif kind == "export":
        _refuse_without_tokenizer(folder)
        model, tokenizer = _load_pretrained(folder, trust)
        name = folder.resolve().name
    else:  # a name on the hub
        model, tokenizer = _load_pretrained(path, trust)
        name = str(path)

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LanguageModel(model.to(device), tokenizer, name, step)


def _load_pretrained(
    path: Path | str, trust: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from lm.runs.exported import load_model, load_tokenizer

    return load_model(path, trust), load_tokenizer(path, trust)


def _refuse_synthetic(folder: Path) -> None:
    """Raise LanguageModelError for a run of the synthetic suite, whose config has a `task`."""
    from lm.config.yaml_text import load_tree

    if "task" in load_tree(folder / RUN_FILE):
        raise LanguageModelError(
            f"{folder} is a run of the synthetic suite, whose tokens are not text: use `fprnn"
            f" synthetic inspect {folder}`"
        )


def _refuse_without_tokenizer(folder: Path) -> None:
    files = ("tokenizer.json", "tokenizer_config.json")
    if not any((folder / file).is_file() for file in files):
        raise LanguageModelError(f"{folder} has no tokenizer ({files[0]}): copy one into it")
