"""The LSTM as a layer: against its equations, written out."""

import pytest
import torch
import torch.nn.functional as F

from lm.model.baseline_layers import LSTM, LSTMState
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import Sequences

WIDTH = 8


@pytest.fixture
def layer():
    torch.manual_seed(0)
    config = FPRNNConfig(vocab_size=24, d_model=WIDTH, n_layer=1, layers="lstm")
    block = FPRNNForCausalLM(config).double().backbone.layers[0].block
    assert type(block) is LSTM
    return block


def by_token(layer, u, h, c, read=lambda state: state):
    """Return the outputs (l,d) of one row u (l,d), and h and c after its last token.

    read: Function of the state (2d) of the token before.
    """
    weights, outputs = dict(layer.lstm.named_parameters()), []
    for x in u:
        h, c = read(torch.cat([h, c])).chunk(2)
        gates = weights["weight_ih_l0"] @ x + weights["bias_ih_l0"]
        gates = gates + weights["weight_hh_l0"] @ h + weights["bias_hh_l0"]
        i, f, g, o = gates.chunk(4)  # torch's order
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs), h, c


def test_layer_equals_its_equations_after_a_state(layer):
    u = torch.randn(2, 7, WIDTH).double()
    before = torch.randn(2, 2, WIDTH).double()  # h and c of both rows
    output, _, end = layer(u, Sequences(state=LSTMState(*before), return_state=True))
    for row in range(2):
        expected = by_token(layer, u[row], *before[:, row])
        for one, other in zip((output[row], end.h[row], end.c[row]), expected):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert not end.h.requires_grad and not end.c.requires_grad


def test_a_document_starts_from_zero_and_padding_keeps_the_state(layer):
    """Rows of 7 and 4 tokens; a document begins at token 3 of the first row, at 1 of the second."""
    u = torch.randn(2, 7, WIDTH).double()
    before = torch.randn(2, 2, WIDTH).double()  # h and c of both rows
    lengths, begins = (7, 4), (3, 1)
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    starts = torch.arange(7) == torch.tensor(begins)[:, None]
    seqs = Sequences(mask, starts, LSTMState(*before), return_state=True)
    output, _, end = layer(u, seqs)
    zero = torch.zeros(WIDTH).double()
    for row, (length, begin) in enumerate(zip(lengths, begins)):
        first, _, _ = by_token(layer, u[row, :begin], *before[:, row])
        second, h, c = by_token(layer, u[row, begin:length], zero, zero)
        expected = torch.cat([first, second])
        torch.testing.assert_close(output[row, :length], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(end.h[row], h, rtol=0, atol=1e-12)
        torch.testing.assert_close(end.c[row], c, rtol=0, atol=1e-12)


def test_a_row_of_padding_keeps_its_state(layer):
    before = LSTMState(*torch.randn(2, 2, WIDTH).double())
    mask = torch.tensor([[True] * 3, [False] * 3])  # the second row has only padding
    u = torch.randn(2, 3, WIDTH).double()
    end = layer(u, Sequences(mask, state=before, return_state=True))[2]
    assert torch.equal(end.h[1], before.h[1]) and torch.equal(end.c[1], before.c[1])
    assert not torch.equal(end.h[0], before.h[0])


def test_values_and_starts_at_padding_do_not_change_the_state(layer):
    """The second row has one token, then padding with NaN and the start of a document."""
    u = torch.randn(2, 3, WIDTH).double()
    mask = torch.tensor([[True] * 3, [True, False, False]])
    starts = torch.tensor([[False] * 3, [False, False, True]])
    expected = layer(u[1:, :1], Sequences(return_state=True))[2]
    u[1, 1:] = float("nan")
    end = layer(u, Sequences(mask, starts, return_state=True))[2]
    torch.testing.assert_close((end.h[1:], end.c[1:]), tuple(expected), rtol=0, atol=1e-12)


def test_flops_are_two_per_weight_of_a_matrix(layer):
    weights = (p.numel() for p in layer.parameters() if p.ndim > 1)
    assert layer.flops_per_token(length=10) == 2 * sum(weights)


def test_the_forget_gate_starts_open(layer):
    bias = layer.lstm.bias_ih_l0  # of i, f, g, o
    assert bias[WIDTH : 2 * WIDTH].eq(1).all() and bias.sum() == WIDTH
    assert layer.lstm.bias_hh_l0.eq(0).all() and F.relu(layer.lstm.weight_hh_l0).any()
