"""Precision of the exact solve in bf16 on a GPU: loss, gradient and answers compared with fp32.

python -m benchmarks.precision [--export DIR --tokens 64 --words 2 --length 256 --device cuda]

The fp32 kernels are also compared with plain PyTorch. The models are the state tracker of the tests
(S3, trained on up to 16 elements) and, with --export, a language model, which reads this text. In
bf16, matrix products and their operands have the dtypes of autocast on a GPU; everything else is
fp32. On a CPU, Triton's interpreter computes the same, at about ten tokens per second.
"""

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

if not torch.cuda.is_available():  # read when a kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.nn.functional as F
from transformers import AutoTokenizer

from benchmarks.harness import print_table
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.kernels import quicken_interpreter
from tests.tracker import tracker, words


def make_problems(a: argparse.Namespace) -> Iterator[tuple[str, Any, torch.Tensor, torch.Tensor]]:
    """Yield names, models in training mode, ids, and targets."""
    if a.words:
        ids, answers = words(a.words, a.length)
        yield f"S3, {a.words} words of {a.length}", tracker(schedule="sequential"), ids, answers
    if a.export:
        model = FPRNNForCausalLM.from_pretrained(a.export).train()
        text = AutoTokenizer.from_pretrained(a.export)(__doc__ * 20)["input_ids"]
        ids = torch.tensor([text[: a.tokens + 1]])
        yield f"{a.export}, {a.tokens} tokens", model, ids[:, :-1], ids[:, 1:]


def compare(model: Any, ids: torch.Tensor, targets: torch.Tensor, device: str) -> dict[str, Any]:
    """Return a row of the table."""
    model, ids, targets = model.to(device), ids.to(device), targets.to(device)
    results = []
    for kernels, autocast in (("plain", False), ("triton", False), ("triton", True)):
        os.environ["FPRNN_KERNELS"] = kernels
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(ids).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((loss.item(), gradient, logits.argmax(-1)))
    plain, (loss, gradient, answers), (bf16_loss, bf16_gradient, bf16_answers) = results

    def relative_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).norm() / b.norm()

    return {
        "loss off plain": f"{abs(loss / plain[0] - 1):.1e}",
        "gradient off plain": f"{relative_difference(gradient, plain[1]):.1e}",
        "fp32 loss": f"{loss:.6f}",
        "bf16 loss": f"{bf16_loss:.6f}",
        "gradient off fp32": f"{relative_difference(bf16_gradient, gradient):.2%}",
        "cosine": f"{F.cosine_similarity(gradient, bf16_gradient, 0):.5f}",
        "same answers": f"{(answers == bf16_answers).float().mean():.2%}",
        "right": f"{(bf16_answers == targets).float().mean():.2%}",
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument(
        "--export", help="a folder that from_pretrained loads (default: only the tracker)"
    )
    p.add_argument("--tokens", type=int, default=64, help="tokens of the text (default: 64)")
    p.add_argument(
        "--words", type=int, default=2, help="number of S3 sequences, 0 for none (default: 2)"
    )
    p.add_argument(
        "--length", type=int, default=256, help="length of the S3 sequences (default: 256)"
    )
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    if a.device == "cpu":
        quicken_interpreter()
    rows = []
    for name, model, ids, targets in make_problems(a):
        start = time.perf_counter()
        rows.append({"": name, **compare(model, ids, targets, a.device)})
        figures = "; ".join(f"{key} {value}" for key, value in list(rows[-1].items())[1:])
        print(f"{name}, {time.perf_counter() - start:.0f} s: {figures}", flush=True)
    print_table("bf16 compared with fp32, sequential kernel in Triton", rows)


if __name__ == "__main__":
    main()
