"""`benchmarks.gpu_model`: what it counts, and that the plan's constants are what it counts."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu_model
from lm.common import cards
from lm.kernels.triton.cell import CHUNK
from lm.report import estimate

SIZES = 768, 1, 16, 2048
RATES = {"name": "mine", "bytes_s": 1e12, "bf16": 1e14, "fp32": 1e13}


def layer(fields, **others):
    return gpu_model.Layer(*SIZES, **{**fields, **others})


@pytest.fixture
def counter():
    with gpu_model.counted() as counter:
        yield counter


def test_an_operation_counts_what_it_reads_and_writes(counter):
    x, w = torch.ones(8, 4), torch.ones(4, 2, dtype=torch.bfloat16)
    counter.done.clear()
    x.view(4, 8), x.t(), x[1:], torch.empty(3)  # nothing is moved
    assert counter.done == []
    x + x[:1].expand(8, 4)  # the row is read once
    x.bfloat16() @ w
    x.mul_(2.0)
    torch.zeros_like(x)
    added, narrowed, product, scaled, zeros = counter.done
    assert added.bytes == 4 * (32 + 4 + 32) and added.flops == 0
    assert narrowed.bytes == (4 + 2) * 32
    assert (product.bytes, product.flops) == (2 * (32 + 8 + 16), 2 * 8 * 4 * 2)
    assert scaled.bytes == 2 * 4 * 32 and zeros.bytes == 4 * 32
    assert counter.cost().launches == counter.cost().syncs == 0


def test_an_operation_takes_the_longest_of_bytes_flops_and_launch():
    on = gpu_model.Rates("", 100.0, bf16=40.0, fp32=10.0, operation_s=1.0, launch_s=2.0)
    of = gpu_model.Operation("", 300.0, 40.0, torch.float32)
    assert of.seconds(on) == 4.0
    assert of._replace(dtype=torch.bfloat16).seconds(on) == 3.0
    nothing = of._replace(bytes=0.0, flops=0.0)
    assert (nothing.seconds(on), nothing._replace(is_triton=True).seconds(on)) == (1.0, 2.0)


def test_token_by_token_is_two_launches_a_token_each_way_and_nothing_waits():
    by_token = layer(gpu_model.EXACT_FIELDS, schedule="sequential")
    forward, both = by_token.cost(backward=False), by_token.cost()
    length, chunks = SIZES[-1], SIZES[-1] // CHUNK
    assert forward.nodes == 2 * length + 1  # the last state
    # Per chunk: the state that enters, inflows and states computed again, the gradient of A.
    assert both.nodes == 4 * length + 1 + 4 * chunks
    assert forward.syncs == both.syncs == 0
    assert both.bytes < 70 * by_token.d_vec
    node_seconds = (cards.TOKEN_S + cards.SEQUENCE_S * 16) * length
    for made, share in ((forward, 1 / 2), (both, 1.0)):
        assert all(s > share * node_seconds for s in made.seconds.values())
    apart = both.seconds["A100"] - both.seconds["H100"]  # nodes take as long on both
    assert 0 < apart < both.seconds["A100"] - node_seconds


def test_the_plan_counts_what_is_counted_here():
    papers = layer(gpu_model.PAPER_FIELDS)
    paper = gpu_model.procedure(papers, adjoint=False)
    exact = gpu_model.procedure(layer(gpu_model.EXACT_FIELDS, schedule="parallel"), adjoint=True)
    counted = {
        "iterate": paper.evaluation.bytes / papers.d_vec,
        "exact": exact.evaluation.bytes / papers.d_vec,
        "full rank": estimate.MOVED["full rank"],  # as without the kernel
    }
    assert counted == pytest.approx(estimate.MOVED, rel=0.1)
    by_term = exact.term.bytes / papers.d_vec
    assert by_term == pytest.approx(estimate.MOVED_BY_TERM["exact"], rel=0.1)
    assert paper.evaluation.syncs == exact.evaluation.syncs == exact.term.syncs == 1
    whole = papers.cost(evaluations=5)
    assert paper.layer(5).bytes == pytest.approx(whole.bytes)
    assert math.isclose(paper.layer(5).seconds["A100"], whole.seconds["A100"], rel_tol=1e-6)


def test_the_table(tmp_path):
    out = tmp_path / "a" / "model.json"
    command = [sys.executable, "-m", "benchmarks.gpu_model", "--batches", "2", "--length", "256"]
    done = subprocess.run(
        [*command, "--d-model", "32", "--json", str(out), "--rates", json.dumps(RATES)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "2 × 256 tokens, d_model 32, 1 reflections" in done.stdout
    assert "mine, ms" in done.stdout and "token by token, mine: " in done.stdout
    parts, layers = (json.loads(out.read_text())["batches"]["2"][k] for k in ("parts", "layers"))
    assert layers["exact, token by token: what auto is"]["syncs"] == 0
    assert parts["F: an evaluation, all tokens at once"]["bytes"] > 0
