"""Sampling from an exported checkpoint."""

from __future__ import annotations

from pathlib import Path


class GenerationError(RuntimeError):
    """Text that cannot be generated; the message says why."""


def load_exported(path: Path | str):
    """(model, tokenizer) of an exported directory or a hub name, on a GPU if there is one.

    Raises:
        GenerationError: there is no such export.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    name = str(path)
    looks_local = Path(path).is_dir() or name.count("/") != 1 or name.startswith(("/", ".", "~"))
    if looks_local and not (Path(path) / "config.json").is_file():
        raise GenerationError(f"no export at {path}: make one with `fprnn export RUN {path}`")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    except OSError as e:
        raise GenerationError(f"cannot load {path}: {str(e).splitlines()[0]}") from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def generate(
    path: Path | str,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Prompt and continuation as text. temperature 0 is greedy decoding.

    Raises:
        GenerationError: there is no such export, or the prompt is empty.
    """
    import torch

    model, tokenizer = load_exported(path)
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise GenerationError("the prompt is empty: give at least one character")
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k}
        if temperature > 0
        else {"do_sample": False}
    )
    ids = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        **sampling,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)
