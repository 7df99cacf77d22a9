"""Tests of the arguments that describe tokens: masks, positions, documents, logits to keep."""

import itertools

import pytest
import torch

from lm.model.batch import find_document_starts
from tests.hf.models import BLOCKS, EOS, PAD, build_fp64, every_model, few_models, make_ids

every_block = pytest.mark.parametrize("name", BLOCKS)
# Two rows of eleven tokens: documents of 4, 6 and 1 tokens, and of 9 and 2.
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]])
DOCUMENT_NUMBERS = torch.tensor([[0] * 4 + [1] * 6 + [5], [7] * 9 + [8] * 2])
CUTS = ((0, 4, 10, 11), (0, 9, 11))  # bounds of these documents, by row


def run_each_document(model, tokens, cuts=CUTS):
    """Return the logits of each document, run by itself; `cuts` are their bounds by row."""
    rows = []
    for row, bounds in zip(tokens, cuts, strict=True):
        documents = [row[None, start:end] for start, end in itertools.pairwise(bounds)]
        rows.append(torch.cat([model(document).logits[0] for document in documents]))
    return torch.stack(rows)


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@every_model
@pytest.mark.parametrize("argument", ["position_ids", "seq_idx", "embeddings", "both"])
@torch.no_grad()
def test_packed_documents_are_independent(name, argument):
    model, tokens = build_fp64(name).eval(), make_ids(2, 11)
    expected = run_each_document(model, tokens)
    assert (model(tokens).logits - expected).abs().max() > 1e-3
    embeds = model.get_input_embeddings()(tokens)
    arguments = {
        "position_ids": {"input_ids": tokens, "position_ids": POSITIONS},
        "seq_idx": {"input_ids": tokens, "seq_idx": DOCUMENT_NUMBERS},
        "embeddings": {"inputs_embeds": embeds, "position_ids": POSITIONS},
        "both": {"input_ids": tokens, "position_ids": POSITIONS, "seq_idx": DOCUMENT_NUMBERS},
    }[argument]
    out = model(**arguments, output_hidden_states=True)
    assert_close(out.logits, expected)
    assert_close(model.base_model(**arguments)[0], out.hidden_states[-1])


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_packed_documents_with_padding_are_independent(name, side):
    model, tokens = build_fp64(name).eval(), make_ids(2, 11)
    expected = run_each_document(model, tokens)
    pad = (3, 0) if side == "left" else (0, 3)
    text = slice(3, None) if side == "left" else slice(None, 11)  # positions without padding
    padded = torch.nn.functional.pad(tokens, pad, value=PAD)
    mask = torch.nn.functional.pad(torch.ones_like(tokens), pad)
    positions = torch.nn.functional.pad(POSITIONS, pad)
    out = model(padded, attention_mask=mask, position_ids=positions)
    assert_close(out.logits[:, text], expected)


@every_block
@torch.no_grad()
def test_positions_and_eos_tokens_both_end_documents(name):
    model, tokens = build_fp64(name).eval(), make_ids(2, 11)
    tokens[0, 6], tokens[1, 2] = EOS, EOS
    expected = run_each_document(model, tokens, ((0, 4, 7, 10, 11), (0, 3, 9, 11)))
    assert_close(model(tokens, position_ids=POSITIONS).logits, expected)
    embeds = model.get_input_embeddings()(tokens)
    assert_close(model(inputs_embeds=embeds, position_ids=POSITIONS).logits, expected)
    model.config.eos_token_id = [EOS, EOS + 1]
    tokens[0, 6] = EOS + 1
    expected = run_each_document(model, tokens, ((0, 4, 7, 10, 11), (0, 3, 9, 11)))
    assert_close(model(tokens, position_ids=POSITIONS).logits, expected)


@every_block
@torch.no_grad()
def test_segment_with_positions_from_0_starts_a_document(name):
    model, tokens = build_fp64(name).eval(), make_ids(2, 11)
    whole = model(tokens, position_ids=POSITIONS).logits
    state = model(tokens[:, :4], return_state=True).state
    # A document starts in the first row; in the second row a document continues.
    rest = model(tokens[:, 4:], position_ids=POSITIONS[:, 4:], state=state).logits
    assert_close(rest, whole[:, 4:])
    # With a cache, the first token continues its document, as in Llama.
    cache = model(tokens[:, :4], use_cache=True).past_key_values
    rest = model(tokens[:, 4:], position_ids=torch.arange(7)[None], past_key_values=cache).logits
    assert_close(rest, model(tokens).logits[:, 4:])


@few_models
@torch.no_grad()
def test_increasing_positions_change_nothing(name):
    model, tokens = build_fp64(name).eval(), make_ids(2, 11)
    plain = model(tokens).logits
    for positions in (torch.arange(11)[None], torch.arange(5, 16).expand(2, -1)):
        assert torch.equal(model(tokens, position_ids=positions).logits, plain)


def test_document_starts_are_found():
    starts = find_document_starts(POSITIONS, None, 2, 11)
    assert starts.nonzero().tolist() == [[0, 0], [0, 4], [0, 10], [1, 0], [1, 9]]
    starts = find_document_starts(None, DOCUMENT_NUMBERS, 2, 11)
    assert starts.nonzero().tolist() == [[0, 4], [0, 10], [1, 9]]
    starts = find_document_starts(torch.tensor([[3, 4, 9, 9]]), None, 3, 4)
    assert starts.int().tolist() == [[0, 0, 0, 1]] * 3  # one row of positions for three rows
    assert find_document_starts(None, None, 2, 11) is None


# Logits


@few_models
@torch.no_grad()
def test_logits_to_keep_selects_positions(name):
    model, tokens = build_fp64(name).eval(), make_ids(2, 11)
    logits = model(tokens).logits
    assert_close(model(tokens, logits_to_keep=3).logits, logits[:, -3:])
    assert_close(model(tokens, logits_to_keep=torch.tensor([2, 7])).logits, logits[:, [2, 7]])
    by_row = torch.tensor([[0, 4, 5], [3, 1, 9]])
    expected = logits[torch.arange(2)[:, None], by_row]
    assert_close(model(tokens, logits_to_keep=by_row).logits, expected)
    mask = tokens > 20
    assert_close(model(tokens, logits_to_keep=mask).logits, logits[mask])
    if name in ("fp_mamba1", "lstm"):
        loss = model(tokens, shift_labels=tokens, logits_to_keep=torch.tensor([2, 7])).loss
        expected = torch.nn.functional.cross_entropy(
            logits[:, [2, 7]].flatten(0, 1), tokens[:, [2, 7]].flatten()
        )
        assert_close(loss, expected)


# Invalid arguments


@pytest.mark.parametrize("name", [*BLOCKS, "lstm", "deltaproduct"])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"lables": 1}, "does not know the argument lables"),
        ({"token_type_ids": 1, "b": 2}, "the argument b, token_type_ids"),
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, r"9, 9\): it must be \(2, 9\)"),
        ({"attention_mask": torch.ones(2, 8)}, r"attention_mask has shape \(2, 8\)"),
        ({"attention_mask": torch.ones(1, 9)}, r"attention_mask has shape \(1, 9\)"),
        ({"position_ids": torch.arange(8)[None]}, r"position_ids has shape \(1, 8\)"),
        ({"position_ids": torch.arange(9)}, r"position_ids has shape \(9,\)"),
        ({"seq_idx": torch.zeros(2, 3)}, r"seq_idx has shape \(2, 3\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 18])}, "does not read cu_seq_lens_q"),
        ({"is_causal": False}, "is causal"),
    ],
)
def test_invalid_arguments_are_refused(name, arguments, message):
    model = build_fp64(name).eval()
    for part in (model, model.base_model):
        with pytest.raises(TypeError if "the argument" in message else ValueError, match=message):
            part(make_ids(), **arguments)


@pytest.mark.parametrize("name", [*BLOCKS, "lstm"])
def test_invalid_tokens_are_refused(name):
    model = build_fp64(name)
    for tokens, message in (
        (
            torch.tensor([[3, 40]]),
            "input_ids are between 3 and 40: the vocabulary has the ids 0 to 39",
        ),
        (torch.tensor([[-1, 3]]), "input_ids are between -1 and 3"),
        (torch.tensor([3, 4]), r"input_ids has shape \(2,\): it must be \(batch, length\)"),
        (torch.zeros(2, 0, dtype=torch.long), r"shape \(2, 0\): it must have"),
        (torch.zeros(0, 4, dtype=torch.long), r"shape \(0, 4\): it must have"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens)
    for tokens in (torch.zeros(2, 3), torch.zeros(2, 0, 16)):
        with pytest.raises(ValueError, match="inputs_embeds has shape"):
            model(inputs_embeds=tokens)
    with pytest.raises(ValueError, match="exactly one"):
        model(make_ids(), inputs_embeds=torch.zeros(2, 9, 16))
    with pytest.raises(ValueError, match="exactly one"):
        model()


def test_arguments_of_transformers_are_accepted(caplog):
    for name in ("fp_mamba1", "lstm"):
        model = build_fp64(name).eval()
        plain = model(make_ids()).logits
        passed = {"output_attentions": True, "is_causal": True, "num_items_in_batch": None}
        passed |= {"cu_seq_lens_q": torch.tensor([0, 9]), "position_ids": torch.arange(9)[None]}
        passed |= {"output_router_logits": False, "token_type_ids": None}
        assert torch.equal(model(make_ids(), **passed).logits, plain)
