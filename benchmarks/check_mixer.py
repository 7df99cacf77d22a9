"""Check that a mixer does what a model takes for granted, in small models in fp64.

    python -m benchmarks.check_mixer my_mixer:PlaneRotation [--block fp_rnn] [--rank 2]

Each check has an oracle that knows nothing of the mixer's formulas: its own matrix, differences of
the loss, the same tokens solved in another order. The exit status is 1 where something is wrong.
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

VOCABULARY = 11
D_MODEL = 8  # d_inner is 16
# ‖I − Q‖ in the checks of a whole model: every token can then be solved to the last digits.
CONTRACTIVE = 0.1
CLOSE = 1e-7  # relative differences of fp64 that are rounding, or the solver's last digits
CLOSE_TO_DIFFERENCES = 1e-5  # of the gradient to differences of the loss
STEP = 1e-6


class Finding(NamedTuple):
    """Result of a check."""

    what: str
    holds: bool
    figure: str


def check_mixer(name: str, block: str = "fp_mamba1", rank: int = 1, seed: int = 0) -> list[Finding]:
    """Run every check of a mixer.

    Args:
        name: As model.mixer.
        block: As model.block, the layers it is tried in.
        rank: As model.mixer_rank.
        seed: Seed of weights and tokens.

    Raises:
        ConfigError: There is no such mixer, or it cannot be made.
    """
    try:
        check_name(name, registered_mixers(), "mixer")
    except ValueError as e:
        raise ConfigError(str(e)) from None
    fields = {"mixer": name, "block": block, "mixer_rank": rank}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        free = _model(fields, contractive=None)
        model = _model(fields, contractive=CONTRACTIVE)
        return [
            *_of_the_mixer(free.fixed_point_blocks()[0]),
            *_of_the_gradient(model),
            *_of_the_order(model),
        ]


def report(findings: list[Finding]) -> str:
    """Return the findings as lines."""
    width = max(len(found.what) for found in findings)
    return "\n".join(
        f"{'ok' if found.holds else 'WRONG':<6} {found.what:<{width}}  {found.figure}"
        for found in findings
    )


def _model(fields: dict, **more):
    section = Model(d_model=D_MODEL, n_layer=1, d_state=4, headdim=8, **fields, **more)
    solver = Solver(schedule="sequential", gradient="exact", tol=1e-12, eval_tol=1e-12)
    return build_section(section, solver, VOCABULARY, 16).double().eval()


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    size = wanted.abs().max().clamp_min(1e-30)
    return ((found - wanted).abs().max() / size).item()


def _close(what: str, found: torch.Tensor, wanted: torch.Tensor, limit: float = CLOSE) -> Finding:
    difference = _difference(found, wanted)
    return Finding(what, difference <= limit, f"relative difference {difference:.1e}")


@torch.no_grad()
def _of_the_mixer(block) -> list[Finding]:
    """Of Q alone: linear, of any leading dimensions, bounded, of low rank where it says so."""
    mixer, d = block.mixer, block.config.d_inner
    P = torch.randn(2, 3, block.mixer_width, dtype=torch.float64)
    v, w = torch.randn(2, 2, 3, d, dtype=torch.float64)
    weights = mixer.weights(P)
    raw = F.linear(P, weights.first, weights.bias)
    Q = mixer.matrix(P)
    by_matrix = (Q @ v.unsqueeze(-1)).squeeze(-1)
    mixed = mixer(raw, 2 * v - 3 * w, weights)
    parts = 2 * mixer(raw, v, weights) - 3 * mixer(raw, w, weights)
    off = torch.eye(d, dtype=torch.float64) - Q
    norm = torch.linalg.matrix_norm(off, ord=2)
    bound = mixer.bound(raw, weights).squeeze(-1).expand_as(norm)
    findings = [
        _close("Q v is linear in v", mixed, parts),
        _close("one raw is taken with many v", mixer(raw, v, weights), by_matrix),
        Finding(
            "bound is at least ‖I − Q‖",
            bool((norm <= bound * (1 + 1e-9) + 1e-12).all()),
            f"‖I − Q‖ up to {norm.max():.3f}, bound up to {bound.max():.3f}",
        ),
    ]
    low_rank = mixer.low_rank(raw, weights)
    if low_rank is not None:
        product = low_rank.U.transpose(-1, -2) @ low_rank.T @ low_rank.U
        findings.append(_close("low_rank is I − Q", product, off))
    return findings


def _of_the_gradient(model) -> list[Finding]:
    """The gradient along a random direction, of all parameters and of the mixers' alone, against
    differences of the loss."""
    ids = torch.randint(VOCABULARY, (1, 5))
    everything = [p for p in model.parameters() if p.requires_grad]
    mixers = [p for block in model.fixed_point_blocks() for p in block.mixer.parameters()]
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    if output.fixed_point.failed.any():
        return [Finding("gradient", False, f"not compared: tokens unsolved at κ = {CONTRACTIVE}")]
    output.loss.backward()
    findings = []
    for what, parameters in (("of all parameters", everything), ("of the mixer's", mixers)):
        parameters = [p for p in parameters if p.grad is not None]
        if not parameters:
            continue
        ways = [torch.randn_like(p) for p in parameters]
        along = sum((p.grad * way).sum() for p, way in zip(parameters, ways))
        differences = _slope(model, ids, parameters, ways)
        findings.append(_close(f"gradient {what}", along, differences, CLOSE_TO_DIFFERENCES))
    return findings


@torch.no_grad()
def _slope(model, ids, parameters, ways) -> torch.Tensor:
    """Of the loss along `ways`, by central differences."""
    losses = []
    for step in (STEP, -2 * STEP):
        for p, way in zip(parameters, ways):
            p.add_(step * way)
        losses.append(model(input_ids=ids, labels=ids).loss)
    for p, way in zip(parameters, ways):
        p.add_(STEP * way)
    return (losses[0] - losses[1]) / (2 * STEP)


@torch.no_grad()
def _of_the_order(model) -> list[Finding]:
    """No token sees a later one, and no order of solving gives something else."""
    ids = torch.randint(VOCABULARY, (2, 9))
    whole = model(input_ids=ids).logits
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % VOCABULARY
    findings = []
    with model.solving(schedule="window:4"):
        by_windows = model(input_ids=ids).logits
        before = model(input_ids=other).logits[:, :6]
    findings.append(_close("no token sees a later one", before, by_windows[:, :6]))
    with model.solving(schedule="parallel"):
        at_once = model(input_ids=ids).logits
    findings.append(_close("all tokens at once: as one after the other", at_once, whole))
    cache, steps = None, []
    for t in range(ids.shape[1]):
        out = model(input_ids=ids[:, t : t + 1], cache=cache, use_cache=True)
        cache = getattr(out, CACHE)
        steps.append(out.logits)
    findings.append(_close("decoding token by token: as a whole pass", torch.cat(steps, 1), whole))
    return findings


def main(argv: list[str] | None = None) -> int:
    """Check the mixer that the command line names."""
    p = argparse.ArgumentParser(description="Check a mixer of one's own (docs/extending.md).")
    p.add_argument("mixer", help="module:Class, or a name, as in model.mixer")
    p.add_argument("--block", choices=("fp_mamba1", "fp_mamba2", "fp_rnn"), default="fp_mamba1")
    p.add_argument("--rank", type=int, default=1, help="model.mixer_rank (default: 1)")
    args = p.parse_args(argv)
    try:
        findings = check_mixer(args.mixer, args.block, args.rank)
    except ConfigError as e:
        p.error(str(e))
    print(report(findings))
    return int(not all(found.holds for found in findings))


if __name__ == "__main__":
    sys.exit(main())
