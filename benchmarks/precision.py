"""Compare the exact solve in bf16 on a GPU with fp32: loss, gradient and answers.

python -m benchmarks.precision [--export DIR --tokens 64 --sequences 2 --length 256 --device cuda]

The fp32 kernels are also compared with plain PyTorch. The models are the state tracker of the tests
(S3, trained on up to 16 elements) and, with --export, a language model, which reads this docstring.
In bf16, matrix products and their operands have the dtypes of autocast on a GPU; everything else is
fp32. On a CPU, Triton's interpreter computes the same, at about ten tokens per second.
"""

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

if not torch.cuda.is_available():  # Triton reads the variable when a kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.nn.functional as F
from transformers import AutoTokenizer

from benchmarks.harness import print_table
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.kernels import quicken_interpreter
from tests.tracker import draw_words, load_tracker


class Problem(NamedTuple):
    """A model and its data."""

    name: str
    model: Any  # in training mode
    ids: torch.Tensor  # (sequences, length)
    targets: torch.Tensor  # (sequences, length)


def make_problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Yield the problems that the options select."""
    if args.sequences:
        ids, answers = draw_words(args.sequences, args.length)
        name = f"S3, {args.sequences} sequences of {args.length}"
        yield Problem(name, load_tracker(schedule="sequential"), ids, answers)
    if args.export:
        model = FPRNNForCausalLM.from_pretrained(args.export).train()
        text_ids = AutoTokenizer.from_pretrained(args.export)(__doc__ * 20)["input_ids"]
        ids = torch.tensor([text_ids[: args.tokens + 1]])
        name = f"{args.export}, {args.tokens} tokens"
        yield Problem(name, model, ids[:, :-1], ids[:, 1:])


def compare(model: Any, ids: torch.Tensor, targets: torch.Tensor, device: str) -> dict[str, Any]:
    """Run the model in fp32 (plain and Triton) and in bf16; return a row of the table."""
    model, ids, targets = model.to(device), ids.to(device), targets.to(device)
    results = []  # (loss, gradient, answers) of each run
    for kernels, is_bf16 in (("plain", False), ("triton", False), ("triton", True)):
        os.environ["FPRNN_KERNELS"] = kernels
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=is_bf16):
            logits = model(ids).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((loss.item(), gradient, logits.argmax(-1)))
    (plain_loss, plain_gradient, _), (loss, gradient, answers), bf16_results = results
    bf16_loss, bf16_gradient, bf16_answers = bf16_results

    def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        return (actual - expected).norm() / expected.norm()

    return {
        "loss vs plain": f"{abs(loss / plain_loss - 1):.1e}",
        "gradient vs plain": f"{relative_difference(gradient, plain_gradient):.1e}",
        "fp32 loss": f"{loss:.6f}",
        "bf16 loss": f"{bf16_loss:.6f}",
        "gradient bf16 vs fp32": f"{relative_difference(bf16_gradient, gradient):.2%}",
        "cosine": f"{F.cosine_similarity(gradient, bf16_gradient, 0):.5f}",
        "same answers": f"{(answers == bf16_answers).float().mean():.2%}",
        "right in bf16": f"{(bf16_answers == targets).float().mean():.2%}",
    }


def main() -> None:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--export", help="folder of a language model (default: only the tracker)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the text (default: 64)")
    parser.add_argument(
        "--sequences", type=int, default=2, help="number of S3 sequences (default: 2)"
    )
    parser.add_argument("--length", type=int, default=256, help="elements of each (default: 256)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        quicken_interpreter()
    rows = []
    for name, model, ids, targets in make_problems(args):
        start = time.perf_counter()
        rows.append({"": name, **compare(model, ids, targets, args.device)})
        numbers = "; ".join(f"{key} {value}" for key, value in list(rows[-1].items())[1:])
        print(f"{name}, {time.perf_counter() - start:.0f} s: {numbers}", flush=True)
    print_table("bf16 compared with fp32, sequential kernel in Triton", rows)


if __name__ == "__main__":
    main()
