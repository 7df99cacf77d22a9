"""Causal stopping on models: what a token's result may depend on, and what is said of it."""

import pytest
import torch
import torch.nn.functional as F

from lm.model import fixed_point
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.solver import NonFiniteError, token_residual
from lm.model.state import Sequences
from tests import golden, oracle_blocks

EOS = 0
SCHEDULES = ("parallel", "window:4", "window:7", "sequential", "auto", "mixed:1,4,7,L")
# As initialised, four reflections do not contract: with the gate outside, many tokens never settle.
FREE = dict(mixer_rank=4, contractive=None, out_norm_epsilon=1e-5)
MODELS = {
    "fp_mamba1": {},
    "fp_mamba2": dict(block="fp_mamba2"),
    "fp_rnn": dict(block="fp_rnn"),
    "fp_mamba1-conv-gate_inside": dict(use_short_conv=True, glu_in_loop=True),
    "fp_mamba1-free": FREE,
    "fp_mamba1-free-gate_inside": dict(**FREE, glu_in_loop=True),
}
every_model = pytest.mark.parametrize("name", MODELS)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
every_tol = pytest.mark.parametrize("tol", [0.1, 1e-4])


def model_of(name, schedule="auto", dtype=torch.float64, **kwargs):
    """A small model; `mixed` is for training, so that model is in training mode."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, d_model=8, n_layer=1, d_state=4, headdim=4, eos_token_id=EOS)
    rule = dict(contractive=0.5, out_norm_epsilon=0.1, max_iters=15, eval_max_iters=15)
    rule["eval_tol"] = kwargs.get("tol", "auto")
    fields = {**sizes, **rule, **MODELS[name], "schedule": schedule, **kwargs}
    model = FPRNNForCausalLM(FPRNNConfig(**fields)).to(dtype)
    return model.train(schedule.startswith("mixed"))


def ids(b=2, length=16, seed=0):
    return torch.randint(1, 30, (b, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model, tokens=None, **kwargs):
    torch.manual_seed(5)  # the widths that `mixed` draws
    return model(tokens, **kwargs)


def largest(a, b):
    return (a - b).abs().max().item()


# What comes later.


def after_a_change(model, at):
    """Two runs, of which the second reads other tokens from `at` on."""
    tokens = ids()
    changed = torch.cat([tokens[:, :at], ids(seed=1)[:, at:]], 1)
    return run(model, tokens), run(model, changed)


@every_tol
@every_schedule
@every_model
def test_later_tokens_change_nothing(name, schedule, tol):
    one, other = after_a_change(model_of(name, schedule, tol=tol), 10)
    assert largest(one.logits[:, :10], other.logits[:, :10]) < 1e-11
    assert largest(one.logits[:, 10:], other.logits[:, 10:]) > 1e-2
    a, b = (out.fixed_point.token_iters[..., :10] for out in (one, other))
    assert torch.equal(a, b)


def test_later_tokens_change_no_gradient():
    """With two layers, in training: the gradient steps after the solve are causal as well."""
    model, grads = model_of("fp_mamba1", "mixed:1,4,7,L", n_layer=2, tol=0.1), []
    for tokens in (ids(), torch.cat([ids()[:, :10], ids(seed=1)[:, 10:]], 1)):
        torch.manual_seed(5)
        model.zero_grad()
        model(tokens).logits[:, :10].square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba1-free-gate_inside"])
def test_later_tokens_do_change_what_the_papers_rule_finds(name):
    """The check above can fail."""
    model = model_of(name, "parallel", stopping="paper", tol=0.1, eval_max_iters=500)
    one, other = after_a_change(model, 10)
    assert largest(one.logits[:, :10], other.logits[:, :10]) > 1e-4


# The rest of the batch, and padding.


@every_tol
@every_schedule
@every_model
def test_a_sequence_alone_and_in_a_batch_are_the_same(name, schedule, tol):
    model, tokens = model_of(name, schedule, tol=tol), ids(8, 16)
    together = run(model, tokens)
    alone = run(model, tokens[5:6])
    assert largest(alone.logits[0], together.logits[5]) < 1e-9
    mine, theirs = alone.fixed_point, together.fixed_point
    for field in ("token_iters", "num_iters", "unconverged", "converged", "hit_max"):
        assert torch.equal(getattr(mine, field)[:, 0], getattr(theirs, field)[:, 5]), field


@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba1-free-gate_inside"])
def test_the_papers_rule_depends_on_the_batch(name):
    """The check above can fail."""
    model, tokens = model_of(name, "parallel", stopping="paper", tol=0.1), ids(8, 16)
    together = run(model, tokens).logits
    rows = [largest(run(model, tokens[i : i + 1]).logits[0], together[i]) for i in range(8)]
    assert max(rows) > 1e-4


def padded(model, pad, **kwargs):
    """A short sequence alone and padded among seven long ones → by how much its logits differ, and
    its token_iters in both."""
    tokens = ids(8)
    mask = torch.ones_like(tokens)
    mask[2] = F.pad(torch.ones(11, dtype=torch.long), pad)
    real = mask[2].bool()
    alone = run(model, tokens[2:3, real], **kwargs)
    together = run(model, tokens, attention_mask=mask, **kwargs)
    iters = alone.fixed_point.token_iters[:, 0], together.fixed_point.token_iters[:, 2, :]
    return largest(together.logits[2, real], alone.logits[0]), iters[0], iters[1], real


@every_schedule
@every_model
def test_padding_on_the_right_changes_nothing(name, schedule):
    difference, alone, among, real = padded(model_of(name, schedule, tol=0.1), (0, 5))
    assert difference < 1e-9 and torch.equal(among[:, real], alone)


@pytest.mark.parametrize("pad", [(5, 0), (3, 2)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES[:5])
@pytest.mark.parametrize("name", ["fp_mamba1", "fp_rnn", "fp_mamba1-free-gate_inside"])
def test_padding_on_the_left_changes_nothing(name, schedule, pad):
    difference, alone, among, real = padded(model_of(name, schedule, tol=0.1), pad)
    assert difference < 1e-9 and torch.equal(among[:, real], alone)


@pytest.mark.parametrize("pad", [(5, 0), (3, 2)], ids=str)
@every_schedule
def test_with_a_state_padding_on_the_left_changes_nothing(schedule, pad):
    model = model_of("fp_mamba1", schedule, tol=0.1)
    difference, alone, among, real = padded(model, pad, return_state=True)
    assert difference < 1e-9 and torch.equal(among[:, real], alone)


# Documents and segments.


def packed():
    """Two documents a row, the second from token 6 on; and another one to be the first."""
    tokens = ids()
    tokens[:, 5] = EOS
    return tokens, ids(seed=1)[:, :5]


@every_schedule
@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba2", "fp_rnn", "fp_mamba1-conv-gate_inside"])
def test_the_document_before_changes_nothing(name, schedule):
    """To the tolerance: how long a token is iterated does depend on what is before it."""
    rule = dict(contractive=0.3, out_norm_epsilon=1.0, tol=1e-8, max_iters=99, eval_max_iters=99)
    model = model_of(name, schedule, **rule)
    tokens, others = packed()
    one, other = run(model, tokens), run(model, torch.cat([others, tokens[:, 5:]], 1))
    assert one.fixed_point.converged.all() and other.fixed_point.converged.all()
    assert largest(one.logits[:, :6], other.logits[:, :6]) > 1e-2
    assert largest(one.logits[:, 6:], other.logits[:, 6:]) < 1e-6
    assert largest(one.logits[:, 6:], run(model, tokens[:, 6:]).logits) < 1e-6


@every_model
def test_token_by_token_documents_and_segments_are_exactly_their_own(name):
    """The sequential schedule carries nothing over but the state, so also before convergence."""
    model = model_of(name, "sequential", tol=0.1)
    tokens, _ = packed()
    whole = run(model, tokens, return_state=True)
    assert largest(whole.logits[:, 6:], run(model, tokens[:, 6:]).logits) < 1e-11
    state, logits = None, []
    for segment in tokens.split((5, 1, 10), 1):
        out = run(model, segment, state=state, return_state=True)
        state = out.state
        logits.append(out.logits)
    assert largest(torch.cat(logits, 1), whole.logits) < 1e-11
    for mine, theirs in zip(state.layers, whole.state.layers):
        assert largest(mine.y, theirs.y) < 1e-11 and largest(mine.h, theirs.h) < 1e-11


# The fixed point.


@pytest.mark.parametrize(
    "schedule", ["parallel", "window:7", "auto"]
)  # the others find others of its fixed points
def test_the_papers_fixed_point(schedule):
    case = golden.Case(golden.HERE / "m1_dplr2.json")
    block, tensors = case.module.double().eval(), case.tensors
    block.load_state_dict({k: v.double() for k, v in case.state.items()})
    cfg = block.config
    cfg.schedule, cfg.stopping, cfg.tol, cfg.eval_tol = schedule, "causal", 1e-9, 1e-9
    with torch.no_grad():
        s = block.prepare(tensors["input/hidden_states"].double())
        y, stats, f_y, _ = block._solve(s)
        assert stats.converged.all() and token_residual(y, block.step(s, y)).max() < 1e-9
        out = block.finish(s, f_y)
    # There are several: a path that differs may end in another. The rows that end in the paper's:
    rows = [i for i in range(3) if largest(y[i], tensors["exact_f64_eval/y_star"][i]) < 1e-6]
    assert len(rows) >= (3 if schedule == "parallel" else 2)
    assert largest(out[rows], tensors["exact_f64_eval/output"][rows]) < 1e-6


@every_schedule
def test_fp_rnn_with_one_reflection_finds_its_only_fixed_point(schedule):
    """Its equation is linear in h_t given h_{t−1}: solved exactly, token by token."""
    rule = dict(contractive=None, out_norm_epsilon=1e-5, tol=1e-11, max_iters=2000)
    model = model_of("fp_rnn", schedule, **{**rule, "eval_max_iters": 2000})
    solution, _, block = solved(model, u_of())
    assert solution.stats.converged.all()
    with torch.no_grad():
        exact = oracle_blocks.fixed_point(block.state_dict(), block.config, u_of())
    assert largest(solution.y, exact) < 1e-9


@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba2", "fp_mamba1-conv-gate_inside"])
def test_where_the_iteration_contracts_all_schedules_find_what_the_paper_finds(name):
    rule = dict(contractive=0.3, out_norm_epsilon=1.0, tol=1e-9, max_iters=99, eval_max_iters=99)
    paper = run(model_of(name, "parallel", stopping="paper", **rule), ids())
    assert paper.fixed_point.converged.all()
    for schedule in SCHEDULES:
        ours = run(model_of(name, schedule, **rule), ids())
        assert ours.fixed_point.converged.all()
        assert largest(ours.logits, paper.logits) < 1e-7


# What is said of it.


def solved(model, u, seqs=None):
    """(Solution, Static, block) of the model's first block on u (b,l,d_model)."""
    block = model.backbone.layers[0].block
    with torch.no_grad():
        torch.manual_seed(5)
        s = block.prepare(u, seqs or Sequences())
        return block._solve(s), s, block


def u_of():
    return torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def with_documents_and_padding():
    mask, starts = torch.ones(3, 16, dtype=torch.bool), torch.zeros(3, 16, dtype=torch.bool)
    mask[0, 11:], starts[1, 6], starts[2, 12] = False, True, True
    return Sequences(mask, starts, return_state=True)


@every_tol
@every_schedule
@every_model
def test_the_residual_is_that_of_what_is_returned(name, schedule, tol):
    model = model_of(name, schedule, tol=tol)
    (y, stats, f_y, h), s, block = solved(model, u_of(), with_documents_and_padding())
    with torch.no_grad():
        g, end = block.step(s, y, True)
    residual = token_residual(y, g)
    close = dict(rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(stats.residual, residual.amax(1), **close)
    torch.testing.assert_close(f_y, g, **close)
    torch.testing.assert_close(h, end, **close)
    missed = residual >= tol
    assert torch.equal(stats.unconverged, missed.double().mean(1))
    assert torch.equal(stats.converged, ~missed.any(1))
    assert torch.equal(stats.hit_max, missed.any(1))
    # Both kinds are tested.
    assert missed.any() if name == "fp_mamba1-free" and tol == 1e-4 else not missed.all()


@every_schedule
def test_a_forward_pass_reports_the_same_with_and_without_a_gradient(schedule):
    model, reports = model_of("fp_mamba1", schedule, tol=0.1), []
    for enabled in (False, True):
        torch.manual_seed(5)
        with torch.set_grad_enabled(enabled):
            out = model(ids())
        reports.append({**out.fixed_point._asdict(), "logits": out.logits.detach()})
    for field, value in reports[0].items():
        torch.testing.assert_close(reports[1][field], value, rtol=1e-9, atol=1e-11, msg=field)


@every_schedule
@pytest.mark.parametrize("max_iters", [1, 2])
def test_out_of_iterations_every_token_is_counted(max_iters, schedule):
    limits = dict(max_iters=max_iters, eval_max_iters=max_iters)
    model, tokens = model_of("fp_mamba1", schedule, tol=1e-14, **limits), ids(2, 12)
    stats = run(model, tokens).fixed_point
    assert (stats.unconverged == 1).all() and stats.hit_max.all() and not stats.converged.any()
    assert (stats.token_iters == max_iters).all()
    assert (stats.residual >= 1e-14).all()


@every_schedule
def test_a_token_that_converges_is_not_counted(schedule):
    """Padding is its own fixed point; so half of these tokens converge whatever the limit is."""
    model = model_of("fp_mamba1", schedule, tol=1e-14, max_iters=2, eval_max_iters=2)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 6:] = 0
    stats = run(model, ids(2, 12), attention_mask=mask).fixed_point
    assert stats.unconverged.tolist() == [[1, 0.5]]
    assert stats.hit_max.all()


@every_schedule
@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba2", "fp_rnn", "fp_mamba1-free"])
def test_the_statistics_bound_each_other(name, schedule):
    model, (b, length) = model_of(name, schedule, tol=1e-3, n_layer=2), (3, 16)
    stats = run(model, ids(b, length)).fixed_point
    for field, value in stats._asdict().items():
        assert value.shape == ((2, b, length) if field == "token_iters" else (2, b)), field
    iters = stats.token_iters
    assert iters.min() >= 1 and iters.max() <= 15
    assert (stats.work >= iters.double().mean(-1)).all()
    assert (stats.num_iters >= iters.amax(-1)).all()
    assert (stats.num_iters <= iters.sum(-1)).all()
    if schedule == "sequential":
        assert torch.equal(stats.num_iters, iters.sum(-1))
        assert (stats.work >= stats.num_iters.double() / length).all()
    if schedule == "parallel":
        assert torch.equal(stats.num_iters, iters.amax(-1))
    assert (stats.penalty == 0).all()


@every_schedule
def test_what_is_not_finite_is_an_error_that_names_layer_and_sequence(schedule):
    model, tokens = model_of("fp_mamba1", schedule, torch.float32, n_layer=2), ids(3, 12)
    embeds = model.get_input_embeddings()(tokens).detach()
    embeds[1, 7, 2] = float("inf")
    embeds[2, 0, 0] = float("nan")
    named = r"the embedded input: .* NaN or infinite at iteration \d+ in sequence\(s\) \[1, 2\]"
    named += " of the batch.*inputs_embeds"
    named = named if schedule == "parallel" else named.replace(r"\[1, 2\]", r"\[(1, )?2\]")
    with pytest.raises(NonFiniteError, match=named):
        run(model, inputs_embeds=embeds)
    with torch.no_grad():
        model.backbone.layers[1].block.D[3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"layer 1: .* in sequence\(s\) \[0, 1, 2\]"):
        run(model, tokens)


# Frozen tokens.


@every_schedule
@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba2", "fp_rnn", "fp_mamba1-free"])
def test_frozen_tokens_never_move(name, schedule, monkeypatch):
    """What is read of the frozen tokens, from the first iteration in which their residuals were
    below tol, is bit for bit what is returned."""
    tol, seen, frozen_early = 1e-3, [], 0

    class Recording(fixed_point.Windows):
        def place(self, rows, position, valid, y_before, h):
            window = super().place(rows, position, valid, y_before, h)
            if y_before is not None:
                seen.append((rows, position[:, 0] - 1, y_before.clone()))
            self.now = rows, position, valid, torch.zeros_like(valid[:, 0], dtype=torch.long)
            return window

        def step(self, window, y):
            g, residual, carry = super().step(window, y)
            rows, position, valid, frozen = self.now
            below = valid & (residual < tol)
            settled = below.long().cumprod(1).sum(1)
            for i, n in enumerate(frozen.tolist()):
                seen.extend((rows[i : i + 1], position[i, t : t + 1], y[i, t : t + 1].clone())
                            for t in range(n))  # fmt: skip
            self.now = rows, position, valid, torch.maximum(frozen, settled)
            return g, residual, carry

    monkeypatch.setattr(fixed_point, "Windows", Recording)
    solution, _, _ = solved(model_of(name, schedule, tol=tol), u_of())
    for rows, at, y in seen:
        inside = at >= 0
        assert torch.equal(y[inside], solution.y[rows[inside], at[inside]])
        frozen_early += inside.sum().item()
    assert frozen_early > 0 or schedule in ("parallel", "mixed:1,4,7,L")
