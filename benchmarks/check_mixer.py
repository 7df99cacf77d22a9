"""Check a custom mixer in small fp64 models.

    python -m benchmarks.check_mixer my_mixer:PlaneRotation [--block fp_rnn] [--rank 2]

The checks compare the mixer with its explicit matrix, gradients with finite differences of the
loss, and the logits of several schedules. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lm.common.errors import ConfigError
from lm.config.model import Model, Solver, registered_mixers
from lm.config.plugin import check_name
from lm.model.batch import CACHE
from lm.training.build import build_section

VOCAB_SIZE = 11
D_MODEL = 8  # d_inner is 16
# Bound κ on ‖I − Q‖ (model.contractive). With it, every token is solved to rounding error.
CONTRACTIVE = 0.1
TOLERANCE = 1e-7  # relative difference in fp64 that counts as rounding and solver error
GRADIENT_TOLERANCE = 1e-5  # relative difference between gradient and finite differences
STEP = 1e-6  # step of the finite differences


class Finding(NamedTuple):
    """Result of a check."""

    name: str  # property that was checked
    holds: bool  # True if the mixer has the property
    measurement: str  # the measured number, as text


def check_mixer(name: str, block: str = "fp_mamba1", rank: int = 1, seed: int = 0) -> list[Finding]:
    """Run all checks of a mixer.

    Args:
        name: Value of model.mixer.
        block: Value of model.block.
        rank: Value of model.mixer_rank.
        seed: Seed of weights and tokens.

    Raises:
        ConfigError: If there is no such mixer, or it cannot be constructed.
    """
    try:
        check_name(name, registered_mixers(), "mixer")
    except ValueError as e:
        raise ConfigError(str(e)) from None
    fields = {"mixer": name, "block": block, "mixer_rank": rank}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unbounded_model = _make_model(fields, contractive=None)
        model = _make_model(fields, contractive=CONTRACTIVE)
        return [
            *_check_matrix(unbounded_model.fixed_point_blocks()[0]),
            *_check_gradient(model),
            *_check_schedules(model),
        ]


def format_findings(findings: list[Finding]) -> str:
    """Return one line of text per finding."""
    width = max(len(finding.name) for finding in findings)
    return "\n".join(
        f"{'ok' if finding.holds else 'WRONG':<6} {finding.name:<{width}}  {finding.measurement}"
        for finding in findings
    )


def _make_model(fields: dict, **more_fields):
    section = Model(d_model=D_MODEL, n_layer=1, d_state=4, headdim=8, **fields, **more_fields)
    solver = Solver(schedule="sequential", gradient="exact", tol=1e-12, eval_tol=1e-12)
    return build_section(section, solver, VOCAB_SIZE, seq_len=16).double().eval()


def _compare(
    name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE
) -> Finding:
    """Compare two tensors, relative to the largest element of `expected`."""
    scale = expected.abs().max().clamp_min(1e-30)
    difference = ((actual - expected).abs().max() / scale).item()
    return Finding(name, difference <= tolerance, f"relative difference {difference:.1e}")


@torch.no_grad()
def _check_matrix(block) -> list[Finding]:
    """Check that Q is linear and broadcasts, and that `bound` and `low_rank` describe I − Q.

    P is the argument of the mixer, `raw` its first projection; Q v is the mixed vector.
    """
    mixer, d = block.mixer, block.config.d_inner
    P = torch.randn(2, 3, block.mixer_width, dtype=torch.float64)
    v, w = torch.randn(2, 2, 3, d, dtype=torch.float64)
    weights = mixer.weights(P)
    raw = F.linear(P, weights.matrix, weights.bias)
    Q = mixer.matrix(P)
    by_matrix = (Q @ v.unsqueeze(-1)).squeeze(-1)
    mixed_sum = mixer(raw, 2 * v - 3 * w, weights)
    sum_of_mixed = 2 * mixer(raw, v, weights) - 3 * mixer(raw, w, weights)
    I_minus_Q = torch.eye(d, dtype=torch.float64) - Q
    norm = torch.linalg.matrix_norm(I_minus_Q, ord=2)
    bound = mixer.bound(raw, weights).squeeze(-1).expand_as(norm)
    findings = [
        _compare("Q v is linear in v", mixed_sum, sum_of_mixed),
        _compare("one `raw` broadcasts over many v", mixer(raw, v, weights), by_matrix),
        Finding(
            "bound is at least ‖I − Q‖",
            bool((norm <= bound * (1 + 1e-9) + 1e-12).all()),
            f"‖I − Q‖ up to {norm.max():.3f}, bound up to {bound.max():.3f}",
        ),
    ]
    low_rank = mixer.low_rank(raw, weights)
    if low_rank is not None:
        product = low_rank.U.transpose(-1, -2) @ low_rank.T @ low_rank.U
        findings.append(_compare("low_rank is I − Q", product, I_minus_Q))
    return findings


def _check_gradient(model) -> list[Finding]:
    """Compare directional derivatives with finite differences of the loss.

    The direction is random, once over all parameters and once over the mixer's only.
    """
    ids = torch.randint(VOCAB_SIZE, (1, 5))
    all_parameters = [p for p in model.parameters() if p.requires_grad]
    mixer_parameters = [p for block in model.fixed_point_blocks() for p in block.mixer.parameters()]
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    if output.fixed_point.failed.any():
        return [Finding("gradient", False, f"not compared: unsolved tokens at κ = {CONTRACTIVE}")]
    output.loss.backward()
    findings = []
    groups = {
        "gradient of all parameters": all_parameters,
        "gradient of the mixer's parameters": mixer_parameters,
    }
    for name, group in groups.items():
        parameters = [p for p in group if p.grad is not None]
        if not parameters:
            continue
        directions = [torch.randn_like(p) for p in parameters]
        slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions))
        expected = _estimate_slope(model, ids, parameters, directions)
        findings.append(_compare(name, slope, expected, GRADIENT_TOLERANCE))
    return findings


@torch.no_grad()
def _estimate_slope(model, ids, parameters, directions) -> torch.Tensor:
    """Return the derivative of the loss along a direction, by central differences."""
    losses = []
    for step in (STEP, -2 * STEP):  # to start + STEP, then to start − STEP
        for p, direction in zip(parameters, directions):
            p.add_(step * direction)
        losses.append(model(input_ids=ids, labels=ids).loss)
    for p, direction in zip(parameters, directions):  # back to the start
        p.add_(STEP * direction)
    return (losses[0] - losses[1]) / (2 * STEP)


@torch.no_grad()
def _check_schedules(model) -> list[Finding]:
    """Check that the model is causal, and that all schedules give the same logits."""
    ids = torch.randint(VOCAB_SIZE, (2, 9))
    sequential_logits = model(input_ids=ids).logits
    other_ids = ids.clone()
    other_ids[:, 6:] = (other_ids[:, 6:] + 1) % VOCAB_SIZE
    findings = []
    with model.solving(schedule="window:4"):
        window_logits = model(input_ids=ids).logits
        other_logits = model(input_ids=other_ids).logits
    findings.append(_compare("causal", other_logits[:, :6], window_logits[:, :6]))
    with model.solving(schedule="parallel"):
        parallel_logits = model(input_ids=ids).logits
    findings.append(_compare("parallel: as sequential", parallel_logits, sequential_logits))
    cache, step_logits = None, []
    for t in range(ids.shape[1]):
        out = model(input_ids=ids[:, t : t + 1], cache=cache, use_cache=True)
        cache = getattr(out, CACHE)
        step_logits.append(out.logits)
    decoding_logits = torch.cat(step_logits, 1)
    findings.append(_compare("decoding: as one pass", decoding_logits, sequential_logits))
    return findings


def main(argv: list[str] | None = None) -> int:
    """Check the mixer that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check a custom mixer (docs/extending.md).")
    parser.add_argument("mixer", help="module:Class or a name, as in model.mixer")
    blocks = ("fp_mamba1", "fp_mamba2", "fp_rnn")
    parser.add_argument("--block", choices=blocks, default="fp_mamba1", help="model.block")
    parser.add_argument("--rank", type=int, default=1, help="model.mixer_rank (default: 1)")
    args = parser.parse_args(argv)
    try:
        findings = check_mixer(args.mixer, args.block, args.rank)
    except ConfigError as e:
        parser.error(str(e))
    print(format_findings(findings))
    return int(not all(finding.holds for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
