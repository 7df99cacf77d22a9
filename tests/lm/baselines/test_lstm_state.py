"""The LSTM in segments, its state carried over, gives what the whole stream gives at once."""

import pytest
import torch
import torch.nn.functional as F

from lm.baselines.deltanet import DeltaNetConfig, DeltaNetForCausalLM
from lm.baselines.lstm import LSTMConfig, LSTMForCausalLM


def lstm(dtype=torch.float64):
    torch.manual_seed(0)
    config = LSTMConfig(
        vocab_size=30, d_model=8, n_layer=2, norm_epsilon=1e-5, tie_embeddings=True
    )  # fmt: skip
    model = LSTMForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def ids(b=2, length=24):
    return torch.randint(1, 30, (b, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sizes", [(24,), (8, 8, 8), (1,) * 24, (5, 19)], ids=str)
@torch.no_grad()
def test_segments_equal_the_whole(sizes):
    model, tokens = lstm(), ids()
    whole = model(tokens, return_state=True)
    assert torch.equal(whole.logits, model(tokens).logits)
    assert (whole.logits[:, 8:] - model(tokens[:, 8:]).logits).abs().max() > 1e-4
    state, logits = None, []
    for segment in tokens.split(sizes, 1):
        out = model(segment, state=state, return_state=True)
        state = out.state
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, whole.state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_neither_state_nor_logits(side):
    """Rows of 6, 1 and no tokens after a segment of 5."""
    model, tokens, lengths = lstm(), ids(3, 11), (6, 1, 0)
    first = model(tokens[:, :5], return_state=True).state
    rows, masks = [], []
    for row, n in zip(tokens[:, 5:], lengths):
        pad = (8 - n, 0) if side == "left" else (0, 8 - n)
        rows.append(F.pad(row[:n], pad))
        masks.append(F.pad(torch.ones(n, dtype=torch.long), pad))
    batch, mask = torch.stack(rows), torch.stack(masks)
    padded = model(batch, attention_mask=mask, state=first, return_state=True)
    assert torch.equal(model(batch, attention_mask=mask, state=first).logits, padded.logits)
    for i, n in enumerate(lengths):
        alone = model(tokens[i : i + 1, : 5 + n], return_state=True)
        mine = padded.logits[i, mask[i].bool()]
        torch.testing.assert_close(mine, alone.logits[0, 5:], rtol=0, atol=1e-12)
        mine = tuple(tuple(t[i : i + 1] for t in layer) for layer in padded.state)
        torch.testing.assert_close(mine, alone.state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_stay_within_a_segment(checkpointing):
    model, tokens = lstm().train(), ids()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    embeds = [
        model.get_input_embeddings()(t).detach().requires_grad_() for t in tokens.split(12, 1)
    ]
    state = model(inputs_embeds=embeds[0], return_state=True).state
    assert all(not t.requires_grad for layer in state for t in layer)
    model(inputs_embeds=embeds[1], state=state).logits[:, -1].sum().backward()
    assert embeds[0].grad is None and (embeds[1].grad.abs().amax(-1) > 0).all()


@torch.no_grad()
def test_bf16_autocast():
    model, tokens, state, logits = lstm(torch.float32), ids(), None, []
    exact = model(tokens).logits
    with torch.autocast("cpu", torch.bfloat16):
        for segment in tokens.split((8, 1, 15), 1):
            out = model(segment, state=state, return_state=True)
            state = out.state
            logits.append(out.logits)
    assert (torch.cat(logits, 1) - exact).abs().max() < 0.1 * exact.abs().max()


@torch.no_grad()
def test_without_asking_there_is_no_state():
    out = lstm()(ids())
    assert out.state is None and len(out.to_tuple()) == 1 and LSTMForCausalLM.carries_state


@torch.no_grad()
def test_a_state_that_cannot_be_used_is_refused_in_a_sentence():
    state = lstm()(ids(), return_state=True).state
    with pytest.raises(ValueError, match="state is of a batch of 2, the input's batch is 3"):
        lstm()(ids(3), state=state)
    with pytest.raises(ValueError, match="state is of 1 layers, the model has 2"):
        lstm()(ids(), state=state[:1])
    config = DeltaNetConfig(vocab_size=30, d_model=8, n_layer=1, n_heads=2, d_ff=16)
    other = DeltaNetForCausalLM(config)
    assert not other.carries_state
    with pytest.raises(ValueError, match="DeltaNetModel cannot start from a state"):
        other(ids(), return_state=True)
