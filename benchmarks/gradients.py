"""The gradients at the fixed point: cosine to finite differences of the whole solve, time, memory.

python -m benchmarks.gradients            (about a minute; prints the table of benchmarks/README.md)
"""

import argparse
import time

import torch

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

PARAMETERS = 60  # drawn at random for the comparison
METHODS = ["one_step", "implicit", "adjoint:2", "adjoint:8", "exact"]
SMALL = dict(d_model=4, d_state=2, use_short_conv=True, tol=1e-9, max_iters=2000)
LARGE = dict(d_model=128, d_state=16, tol=0.1, max_iters=100, glu_in_loop=True)


def block(method, gate_bias, sizes):
    torch.manual_seed(0)
    config = FPRNNConfig(vocab_size=8, n_layer=1, gradient=method, **sizes)
    made = FPRNNForCausalLM(config).backbone.layers[0].block.train()
    torch.nn.init.constant_(made.mixer.alpha_proj.bias, gate_bias)
    return made


def gradient(made, u, cotangent):
    made.zero_grad()
    (made(u)[0] * cotangent).sum().backward()
    return torch.cat([p.grad.flatten() for p in made.parameters()])


def finite_differences(made, u, cotangent, chosen, h=1e-5):
    """Central differences over the chosen parameters, solve and all."""
    columns, start = {}, 0
    with torch.no_grad():
        for p in made.parameters():
            flat = p.view(-1)
            for i in range(p.numel()):
                if start + i not in chosen:
                    continue
                value = flat[i].item()
                flat[i] = value + h
                plus = (made(u)[0] * cotangent).sum().item()
                flat[i] = value - h
                minus = (made(u)[0] * cotangent).sum().item()
                flat[i] = value
                columns[start + i] = (plus - minus) / (2 * h)
            start += p.numel()
    return torch.tensor([columns[i] for i in sorted(chosen)], dtype=torch.float64)


def kept_bytes(made, u):
    """Bytes saved for the backward by one forward pass."""
    seen = {}

    def pack(t):
        storage = t.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = made(u)
    del output
    return sum(seen.values())


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(1)
    u = torch.randn(1, 12, 4, generator=g, dtype=torch.float64)
    cotangent = torch.randn(1, 12, 4, generator=g, dtype=torch.float64)
    big_u = torch.randn(8, 128, 128, generator=g)
    cosines = {m: [] for m in METHODS}
    settings = [("strong contraction (gates 0.05)", -3.0), ("weak contraction (gates 0.5)", 0.0)]
    for _, bias in settings:
        made = block("one_step", bias, SMALL).double()
        total = sum(p.numel() for p in made.parameters())
        chosen = set(torch.randperm(total, generator=g)[:PARAMETERS].tolist())
        exact = finite_differences(made, u, cotangent, chosen)
        for m in METHODS:
            ours = gradient(block(m, bias, SMALL).double(), u, cotangent)[sorted(chosen)]
            cosines[m].append(torch.cosine_similarity(ours, exact, dim=0).item())
    large = {m: block(m, 0.0, LARGE) for m in METHODS}
    kept = {m: kept_bytes(made, big_u) for m, made in large.items()}
    seconds = dict.fromkeys(METHODS, float("inf"))
    for _ in range(8):  # in turn: whatever else the machine does falls on all
        for m, made in large.items():
            began = time.perf_counter()
            gradient(made, big_u, big_u)
            seconds[m] = min(seconds[m], time.perf_counter() - began)
    print("| gradient | " + " | ".join(f"cosine, {name}" for name, _ in settings), end="")
    print(" | time | memory kept |\n| --- | --- | --- | --- | --- |")
    for m in METHODS:
        cells = " | ".join(f"{c:.6f}" for c in cosines[m])
        time_ratio, memory_ratio = seconds[m] / seconds["one_step"], kept[m] / kept["one_step"]
        print(f"| `{m}` | {cells} | ×{time_ratio:.2f} | ×{memory_ratio:.2f} |")


if __name__ == "__main__":
    main()
