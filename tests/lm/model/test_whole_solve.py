"""A layer's whole solve from tensors alone: the plain loop gives what the kernel gives."""

import itertools

import pytest
import torch

from lm.model import blocks
from tests.hf.models import build, ids

CASES = [
    ("fp_mamba1", {"mixer": "householder", "mixer_rank": 2, "glu_in_loop": True}),
    ("fp_mamba1", {"mixer": "dplr", "mixer_rank": 3, "contractive": 0.9}),
    ("fp_mamba2", {"mixer": "householder", "mixer_rank": 1, "ngroups": 2, "eigen_range": "signed"}),
    ("fp_mamba2", {"mixer": "dplr", "mixer_rank": 2, "bc_norm": False}),
    ("fp_rnn", {"mixer": "householder", "mixer_rank": 2, "contractive": 0.7}),
]


@pytest.fixture
def solves(monkeypatch):
    """What blocks asked to be solved: a list of the arguments."""
    asked, solve = [], blocks.whole_solve

    def watched(*args):
        asked.append(args)
        return solve(*args)

    monkeypatch.setattr(blocks, "whole_solve", watched)
    return asked


@pytest.mark.parametrize("name, fields", CASES)
@pytest.mark.parametrize("documents", [False, True])
def test_the_plain_loop_is_the_kernel_with_its_gradients(name, fields, documents, solves):
    model = build(name, **fields).double().train()
    torch.nn.init.normal_(model.backbone.embeddings.weight)
    x = ids(2, 7)
    model(x, seq_idx=torch.arange(7)[None] // 3 if documents else None, labels=x)
    layout, options, tensors, *_ = solves[-1]
    kept = [
        t if t is None else t.detach().clone().requires_grad_(t.is_floating_point())
        for t in tensors
    ]
    before = (torch.full_like(kept[2][:, 0], 0.1), None)
    kept[-2:] = before
    found = []
    for solve in (blocks._by_kernel, blocks.whole_solve_plain):
        inputs = [t if t is None else t.detach().requires_grad_() for t in kept[:5] + kept[6:10]]
        args = *inputs[:5], kept[5] if kept[5] is None else kept[5].detach(), *inputs[5:], *before
        extra = (None,) if solve is blocks._by_kernel else ()
        y, h, outcome = solve(layout, options, args, *extra)
        inputs = [t for t in inputs if t is not None]
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
        found.append([y, h, outcome, *torch.autograd.grad((y * weights).sum(), inputs)])
    assert not found[0][2].any()
    for kernel, plain in itertools.zip_longest(*found):
        torch.testing.assert_close(plain, kernel, rtol=1e-8, atol=1e-9)
