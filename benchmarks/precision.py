"""What bf16 changes of the exact token on a GPU: loss, gradient and answers beside fp32, and how
far that is from plain PyTorch.

python -m benchmarks.precision [--export DIR --tokens 64 --words 2 --length 256 --device cuda]

Of the state tracker of the tests (S3, trained on words of up to 16 letters) and, given the export
of a language model, of that on this text. In bf16 products, and the rows and maps that they are of,
are as under autocast on a GPU; everything else is in fp32. On a CPU Triton's interpreter does the
same, at some ten tokens a second.
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

from benchmarks.harness import show
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.kernels import quicken_interpreter
from tests.tracker import tracker, words


def problems(a: argparse.Namespace) -> Iterator[tuple[str, Any, torch.Tensor, torch.Tensor]]:
    """Names, models in training mode, ids and what is to be predicted."""
    if a.words:
        ids, answers = words(a.words, a.length)
        yield f"S3, {a.words} words of {a.length}", tracker(schedule="sequential"), ids, answers
    if a.export:
        model = FPRNNForCausalLM.from_pretrained(a.export).train()
        text = AutoTokenizer.from_pretrained(a.export)(__doc__ * 20)["input_ids"]
        ids = torch.tensor([text[: a.tokens + 1]])
        yield f"{a.export}, {a.tokens} tokens", model, ids[:, :-1], ids[:, 1:]


def compare(model: Any, ids: torch.Tensor, targets: torch.Tensor, device: str) -> dict[str, Any]:
    """A row of the table."""
    model, ids, targets = model.to(device), ids.to(device), targets.to(device)
    found = []
    for kernels, autocast in (("plain", False), ("triton", False), ("triton", True)):
        os.environ["FPRNN_KERNELS"] = kernels
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(ids).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((loss.item(), gradient, logits.argmax(-1)))
    plain, (loss, gradient, answers), (narrow_loss, its_gradient, its_answers) = found

    def apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).norm() / b.norm()

    return {
        "loss off plain": f"{abs(loss / plain[0] - 1):.1e}",
        "gradient off plain": f"{apart(gradient, plain[1]):.1e}",
        "fp32 loss": f"{loss:.6f}",
        "bf16 loss": f"{narrow_loss:.6f}",
        "gradient off fp32": f"{apart(its_gradient, gradient):.2%}",
        "cosine": f"{F.cosine_similarity(gradient, its_gradient, 0):.5f}",
        "same answers": f"{(answers == its_answers).float().mean():.2%}",
        "right": f"{(its_answers == targets).float().mean():.2%}",
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--export", help="a folder that from_pretrained loads; none: the tracker alone")
    p.add_argument("--tokens", type=int, default=64, help="of the text (default: 64)")
    p.add_argument("--words", type=int, default=2, help="of S3 (default: 2); 0: none")
    p.add_argument("--length", type=int, default=256, help="of the words (default: 256)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    if a.device == "cpu":
        quicken_interpreter()
    rows = []
    for name, model, ids, targets in problems(a):
        start = time.perf_counter()
        rows.append({"": name, **compare(model, ids, targets, a.device)})
        said = "; ".join(f"{key} {value}" for key, value in list(rows[-1].items())[1:])
        print(f"{name}, {time.perf_counter() - start:.0f} s: {said}", flush=True)
    show("bf16 beside fp32, token by token in Triton", rows)


if __name__ == "__main__":
    main()
