"""A stream in segments with a carried state equals the whole stream."""

import pytest
import torch
import torch.nn.functional as F

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import Sequences, last_valid_tokens

EOS = 0
BLOCKS = {
    f"{block}{'-conv' * conv}": dict(block=block, use_short_conv=conv)
    for block in ("fp_mamba1", "fp_mamba2", "fp_rnn")
    for conv in (False, True)
}
BLOCKS["fp_mamba1-conv-gate_inside"] = dict(use_short_conv=True, glu_in_loop=True)
BLOCKS["fp_mamba1-dt"] = dict(dt_h_dep=True)
SEGMENTS = {
    "whole": (24,),
    "three": (8, 8, 8),
    "ones": (1,) * 24,
    "uneven": (5, 19),
    "short": (2, 1, 3, 18),
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def model_of(dtype=torch.float64, **kwargs):
    """Return a model whose iterations contract, so that a solve is exact to 1e-12.

    No bias is zero, because a padded convolution with a zero bias would look like no convolution.
    """
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, d_model=8, n_layer=2, d_state=4, headdim=4, eos_token_id=EOS)
    rule = dict(contractive=0.3, out_norm_epsilon=1.0, tol=1e-12, max_iters=200, eval_max_iters=200)
    model = FPRNNForCausalLM(FPRNNConfig(**{**sizes, **rule, **kwargs})).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.add_(0.3 * torch.randn_like(p))
            if name.endswith("bc_y_proj.gain"):
                p.mul_(0.1)
    return model


def ids(b=2, length=24, seed=0):
    return torch.randint(1, 30, (b, length), generator=torch.Generator().manual_seed(seed))


def named_tensors(state):
    """Return (name, tensor) of all tensors in a state."""
    for index, layer in enumerate(state.layers):
        yield f"{index}.y", layer.y
        yield f"{index}.h", layer.h
        yield from ((f"{index}.conv.{i}", tail) for i, tail in enumerate(layer.conv))
    if state.last_token is not None:
        yield "last_token", state.last_token


def assert_same_state(a, b, **tolerance):
    a, b = dict(named_tensors(a)), dict(named_tensors(b))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **(tolerance or dict(rtol=0, atol=1e-9)))


def run_segments(model, tokens, sizes, **kwargs):
    state, logits = None, []
    for segment in tokens.split(sizes, 1):
        out = model(segment, state=state, return_state=True, **kwargs)
        state = out.state
        logits.append(out.logits)
        assert (out.fixed_point.failed == 0).all()
    return torch.cat(logits, 1), state


@every_block
@torch.no_grad()
def test_segments_equal_the_whole(name):
    model, tokens = model_of(**BLOCKS[name]), ids()
    whole = model(tokens, return_state=True)
    without_state = model(tokens[:, 8:]).logits
    assert (whole.logits[:, 8:] - without_state).abs().max() > 1e-4
    for sizes in SEGMENTS.values():
        logits, state = run_segments(model, tokens, sizes)
        torch.testing.assert_close(logits, whole.logits, rtol=0, atol=1e-8)
        assert_same_state(state, whole.state)
    layer = whole.state.layers[0]
    conv_count = 2 if model.config.block == "fp_rnn" else 1
    if not model.config.use_short_conv:
        conv_count = 0
    assert layer.y.shape == (2, 16) and len(layer.conv) == conv_count
    h_shape = {"fp_mamba1": (2, 16, 4), "fp_mamba2": (2, 4, 4, 4), "fp_rnn": (2, 16)}
    assert layer.h.shape == h_shape[model.config.block]


@every_block
@torch.no_grad()
def test_documents_in_segments_start_from_an_empty_state(name):
    model, tokens = model_of(**BLOCKS[name]), ids()
    tokens[0, 3] = tokens[0, 7] = tokens[0, 17] = tokens[0, 19] = EOS  # 7: a border of `three`
    tokens[1, 4] = tokens[1, 6] = tokens[1, 23] = EOS  # 4: a border of `uneven`
    whole = model(tokens, return_state=True)
    alone = model(tokens[:1, 8:18]).logits
    for sizes in SEGMENTS.values():
        logits, state = run_segments(model, tokens, sizes)
        torch.testing.assert_close(logits, whole.logits, rtol=0, atol=1e-8)
        torch.testing.assert_close(logits[:1, 8:18], alone, rtol=0, atol=1e-8)
        assert_same_state(state, whole.state)
    assert state.last_token.tolist() == [tokens[0, -1].item(), EOS]
    model.config.reset_at_eos = False
    one_document = model(tokens).logits
    assert (one_document - whole.logits).abs().max() > 1e-4
    torch.testing.assert_close(
        run_segments(model, tokens, (8, 8, 8))[0], one_document, rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("side", ["left", "right"])
@every_block
@torch.no_grad()
def test_padding_changes_neither_state_nor_logits(name, side):
    """Rows of 6, 1 and no tokens, padded with EOS, after a segment of 5."""
    model, tokens = model_of(**BLOCKS[name]), ids(3, 12)
    tokens[0, 8] = EOS
    first = model(tokens[:, :5], return_state=True).state
    lengths = (6, 1, 0)
    rows, masks = [], []
    for row, n in zip(tokens[:, 5:11], lengths):
        pad = (6 - n, 2) if side == "left" else (0, 8 - n)  # left: 2 tokens on the right, too
        rows.append(F.pad(row[:n], pad, value=EOS))
        masks.append(F.pad(torch.ones(n, dtype=torch.long), pad))
    batch, mask = torch.stack(rows), torch.stack(masks)
    padded = model(batch, attention_mask=mask, state=first, return_state=True)
    after = model(tokens[:, 11:], state=padded.state).logits
    for i, n in enumerate(lengths):
        row = tokens[i : i + 1]
        alone = model(row[:, : 5 + n], return_state=True)
        logits = padded.logits[i, mask[i].bool()]
        torch.testing.assert_close(logits, alone.logits[0, 5:], rtol=0, atol=1e-8)
        padded_tensors = dict(named_tensors(padded.state))
        for name_of_tensor, value in named_tensors(alone.state):
            torch.testing.assert_close(
                padded_tensors[name_of_tensor][i : i + 1],
                value,
                rtol=0,
                atol=1e-9,
                msg=name_of_tensor,
            )
        continued = model(torch.cat([row[:, : 5 + n], row[:, 11:]], 1)).logits[0, -1]
        torch.testing.assert_close(after[i, 0], continued, rtol=0, atol=1e-8)


@torch.no_grad()
def test_hidden_states_keep_the_order_of_the_input():
    model, tokens = model_of(), ids(1, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    kwargs = dict(attention_mask=mask, output_hidden_states=True)
    plain, with_state = model(tokens, **kwargs), model(tokens, return_state=True, **kwargs)
    for a, b in zip(plain.hidden_states, with_state.hidden_states, strict=True):
        torch.testing.assert_close(a[:, 2:], b[:, 2:], rtol=0, atol=1e-9)


@every_block
def test_gradients_stay_within_a_segment(name):
    model, tokens = model_of(**BLOCKS[name]).train(), ids()
    embeds = [
        model.get_input_embeddings()(t).detach().requires_grad_() for t in tokens.split(12, 1)
    ]
    first = model(inputs_embeds=embeds[0], return_state=True)
    assert (first.state.last_token == -1).all()  # unknown, but no EOS token
    assert all(not t.requires_grad for _, t in named_tensors(first.state))
    second = model(inputs_embeds=embeds[1], state=first.state)
    second.logits[:, -1].sum().backward()
    assert embeds[0].grad is None
    assert (embeds[1].grad[:, -1].abs().amax(-1) > 0).all()
    assert embeds[1].grad[:, -3].abs().max() > 0


@every_block
def test_gradient_with_a_state_stops_at_the_segment(name):
    """Compare with finite differences of the output, with y* and the state held fixed."""
    model, tokens = model_of(**BLOCKS[name], n_layer=1, gradient="one_step"), ids()
    block = model.backbone.layers[0].block
    u = 0.5 * torch.randn(2, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        start = model(tokens, return_state=True).state.layers[0]
        seqs = Sequences(state=start)
        y_star = block.choose_solver(u).solve(block.prepare(u, seqs)).y
    u.requires_grad_()
    weights = torch.randn(2, 6, 8, dtype=torch.float64)
    (block(u, seqs)[0] * weights).sum().backward()
    direction = torch.randn_like(u)

    def output_at(epsilon):
        inputs = block.prepare(u + epsilon * direction, seqs)
        out = block.gate_and_project(inputs, block.step(inputs, y_star))
        return (out * weights).sum().item()

    with torch.no_grad():
        numeric = (output_at(1e-6) - output_at(-1e-6)) / 2e-6
    assert numeric == pytest.approx((u.grad * direction).sum().item(), rel=1e-5, abs=1e-7)


@every_block
@torch.no_grad()
def test_segments_agree_under_bf16_autocast(name):
    model, tokens = model_of(torch.float32, **BLOCKS[name], tol=1e-2), ids()
    exact = model(tokens).logits
    state, logits = None, []
    with torch.autocast("cpu", torch.bfloat16):
        for segment in tokens.split((8, 1, 15), 1):
            out = model(segment, state=state, return_state=True)
            state = out.state
            logits.append(out.logits)
    assert (torch.cat(logits, 1) - exact).abs().max() < 0.1 * exact.abs().max()
    for layer in state.layers:
        assert layer.y.dtype == layer.h.dtype == torch.float32  # as wide as inside a segment


@every_block
@torch.no_grad()
def test_returning_the_state_changes_nothing(name):
    model, tokens = model_of(**BLOCKS[name], tol=1e-2), ids()
    tokens[0, 5] = EOS
    plain, with_state = model(tokens, use_cache=False), model(tokens, return_state=True)
    assert plain.state is None and "state" not in plain and len(plain.to_tuple()) == 2
    assert torch.equal(plain.logits, with_state.logits)
    assert torch.equal(plain.fixed_point.evaluations, with_state.fixed_point.evaluations)


def test_last_valid_tokens_are_within_the_document():
    x = torch.arange(1, 13).reshape(2, 6, 1)
    assert last_valid_tokens(x, 2, None, Sequences()).flatten(1).tolist() == [[5, 6], [11, 12]]
    mask = torch.tensor([[True] * 3 + [False] * 3, [False] * 6])
    before = torch.tensor([[[-2], [-1]], [[-4], [-3]]])
    assert last_valid_tokens(x, 2, before, Sequences(mask)).flatten(1).tolist() == [
        [2, 3],
        [-4, -3],
    ]
    starts = torch.zeros(2, 6, dtype=torch.bool)
    starts[0, 2] = starts[1, 0] = True
    assert last_valid_tokens(x, 2, before, Sequences(mask, starts)).flatten(1).tolist() == [
        [0, 3],
        [-4, -3],
    ]
    one = Sequences(starts=starts[:, :1])
    assert last_valid_tokens(x[:, :1], 3, before[:, [0, 0, 1]], one).flatten(1).tolist() == [
        [-2, -1, 1],
        [0, 0, 7],
    ]
