"""Centroids of LSTM, sLSTM and M²RNN: against loops over tokens, with documents and states."""

import pytest
import torch

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import Sequences, list_tensors
from tests.lm.model import test_lstm, test_m2rnn, test_slstm

COUNT = 5
SIZES = dict(vocab_size=24, d_model=32, headdim=8, d_state=16, n_layer=1, state_centroids=COUNT)
WIDTHS = {"lstm": 2 * 32, "slstm": 32, "m2rnn": 64 * 16}  # numbers that centroids read
KINDS = pytest.mark.parametrize("kind", WIDTHS)
NAMES = {"vectors", "keys", "key_bias"}


def make_block(kind, **fields):
    """Return a layer with random parameters in fp64, whose centroids are all read."""
    torch.manual_seed(0)
    model = FPRNNForCausalLM(FPRNNConfig(**{**SIZES, "layers": kind, **fields})).double()
    block = model.backbone.layers[0].block
    for name, p in block.named_parameters():
        torch.nn.init.normal_(p, std=0.1 if name == "centroids.keys" else 0.4)
    return block


def run_by_token(kind, block, u):
    """Compute a row u (l,32) token by token, without code of the layer."""
    centroids = block.centroids

    def read(state):
        if not state.detach().any():
            return torch.zeros_like(state)
        weights = torch.softmax(centroids.keys @ state + centroids.key_bias, 0)
        return weights @ centroids.vectors

    if kind == "lstm":
        zero = u.new_zeros(32)
        return test_lstm.by_token(block, u, zero, zero, read)[0]
    if kind == "slstm":
        return test_slstm.run_by_token(block, u, read)
    return test_m2rnn.run_by_token(block, u, 1, read)


@KINDS
def test_output_and_every_gradient_equal_the_loop(kind):
    block = make_block(kind)
    assert block.centroids.vectors.shape == (COUNT, WIDTHS[kind])
    u = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    named = {"u": u, **dict(block.named_parameters())}
    assert {f"centroids.{name}" for name in NAMES} < named.keys()
    output, expected = block(u[None])[0][0], run_by_token(kind, block, u)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    gradients, expected_gradients = (
        torch.autograd.grad(out.sin().sum(), list(named.values()), allow_unused=True)
        for out in (output, expected)
    )
    for name, gradient, other in zip(named, gradients, expected_gradients):
        assert gradient.abs().max() > 1e-9, name
        torch.testing.assert_close(gradient, other, rtol=1e-7, atol=1e-10, msg=name)


@KINDS
@torch.no_grad()
def test_documents_padding_and_states_equal_separate_rows(kind):
    """Rows of 8 and 5 tokens; a document starts at token 3 of the first row, at 1 of the second."""
    block, lengths, begins = make_block(kind), (8, 5), (3, 1)
    u = torch.randn(2, 8, 32, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    starts = torch.arange(8) == torch.tensor(begins)[:, None]
    outputs, state = [], None
    for begin, end in ((0, 2), (2, 4), (4, 8)):  # segments of a stream
        seqs = Sequences(mask[:, begin:end], starts[:, begin:end], state, return_state=True)
        output, _, state = block(u[:, begin:end], seqs)
        outputs.append(output)
    output = torch.cat(outputs, 1)
    for row, (length, begin) in enumerate(zip(lengths, begins)):
        documents = u[row, :begin], u[row, begin:length]
        expected = torch.cat([run_by_token(kind, block, document) for document in documents])
        torch.testing.assert_close(output[row, :length], expected, rtol=0, atol=1e-10)
        _, _, end = block(documents[1][None], Sequences(return_state=True))
        for one, other in zip(list_tensors(state), list_tensors(end)):
            torch.testing.assert_close(one[row], other[0], rtol=0, atol=1e-10)


@KINDS
def test_decoding_equals_the_full_pass_after_a_round_trip(kind, tmp_path):
    torch.manual_seed(0)
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers=kind)).eval()
    model.save_pretrained(tmp_path)
    loaded = FPRNNForCausalLM.from_pretrained(tmp_path).eval()
    ids, state, logits = torch.randint(3, 24, (2, 7)), None, []
    with torch.no_grad():
        for t in range(7):
            output = loaded(ids[:, t : t + 1], state=state, return_state=True)
            logits.append(output.logits)
            state = output.state
        expected = model(ids).logits
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=1e-5)


@KINDS
def test_new_centroids_are_random_and_counted(kind):
    models = [
        FPRNNForCausalLM(FPRNNConfig(**{**SIZES, "state_centroids": count}, layers=kind))
        for count in (0, 400)
    ]
    without, block = (model.backbone.layers[0].block for model in models)
    assert without.centroids is None
    assert abs(block.centroids.vectors.square().mean() - 1) < 0.05
    scale = 16 / WIDTHS[kind]
    torch.testing.assert_close(block.centroids.keys, scale * block.centroids.vectors)
    more = block.flops_per_token(9) - without.flops_per_token(9)
    assert more == 2 * 2 * 400 * WIDTHS[kind]  # two products


@KINDS
@torch.no_grad()
def test_centroids_read_the_vectors_of_the_returned_state(kind):
    """A layer with its own state vector as its only centroid continues as without centroids."""
    block = make_block(kind, state_centroids=1)
    u = torch.randn(1, 6, 32, dtype=torch.float64)
    centroids, block.centroids = block.centroids, None
    _, _, state = block(u[:, :4], Sequences(return_state=True))
    expected = block(u[:, 4:5], Sequences(state=state, return_state=True))[0]
    block.centroids = centroids
    vectors = block.state_vector(state)
    assert vectors.shape == (1, WIDTHS[kind])
    centroids.vectors.copy_(vectors)
    changed = block.with_state_vector(state, 2 * vectors)
    torch.testing.assert_close(block.state_vector(changed), 2 * vectors)
    output = block(u[:, 4:5], Sequences(state=state, return_state=True))[0]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
