"""The checks of transformers' GenerationTesterMixin, for fixed-point blocks and baselines."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from lm.model.state import FPRNNCache
from tests.hf.models import BLOCKS, EOS, PAD, VOCAB, build_fp64, every_model, few_models, make_ids

every_block = pytest.mark.parametrize("name", BLOCKS)
GREEDY = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": PAD}
DICT = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


def build_with_large_head(name, **fields):
    """Return a model that generates different tokens: with the initial head, some repeat one."""
    model = build_fp64(name, tie_embeddings=False, **fields).eval()
    torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(3))
    return model


def check_outputs(output, prompt, steps, rows, use_cache, n_layer):
    """Check the shapes in a dictionary-like output."""
    assert output.sequences.shape == (rows, prompt.shape[1] + steps)
    assert [s.shape for s in output.scores] == [(rows, VOCAB)] * steps
    assert [s.shape for s in output.logits] == [(rows, VOCAB)] * steps
    assert len(output.hidden_states) == steps
    for index, states in enumerate(output.hidden_states):
        length = 1 if use_cache and index else prompt.shape[1] + index
        assert [h.shape[1:] for h in states] == [(length, 16)] * (n_layer + 1)


@every_model
def test_greedy_generation_equals_argmax_of_forward_passes(name):
    model, tokens = build_with_large_head(name), make_ids(2, 6)
    expected = tokens
    for _ in range(5):
        logits = model(expected, use_cache=False).logits if name in BLOCKS else model(expected)[0]
        logits[:, -1, EOS] = -torch.inf  # as min_new_tokens does
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
    for use_cache in (True, False):
        output = model.generate(tokens, use_cache=use_cache, **GREEDY, **DICT)
        assert isinstance(output, GenerateDecoderOnlyOutput)
        assert torch.equal(output.sequences, expected)
        n_layer = model.config.num_hidden_layers
        check_outputs(output, tokens, steps=5, rows=2, use_cache=use_cache, n_layer=n_layer)
        assert isinstance(output.past_key_values, FPRNNCache) == use_cache
    assert torch.equal(model.generate(tokens, **GREEDY), expected)
    assert expected[:, 6:].unique().numel() > 2


@every_model
def test_sampling_beams_and_multiple_returns_work(name):
    model, tokens = build_with_large_head(name), make_ids(2, 6)
    for kwargs in (
        {"do_sample": True, "num_return_sequences": 2},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": False},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
    ):
        outputs = []
        for use_cache in (True, False):
            torch.manual_seed(4)
            options = {**GREEDY, **DICT, **kwargs, "use_cache": use_cache}
            outputs.append(model.generate(tokens, **options))
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
        assert outputs[0].sequences.shape == (4, 11)
        has_beams = "num_beams" in kwargs
        assert isinstance(outputs[0], GenerateBeamDecoderOnlyOutput) == has_beams
        if has_beams:
            assert (outputs[0].sequences_scores < 0).all()


@every_model
@torch.no_grad()
def test_left_padding_changes_nothing(name):
    model, tokens = build_with_large_head(name), make_ids(2, 6)
    mask = torch.ones_like(tokens)
    padded = {"input_ids": F.pad(tokens, (3, 0)), "attention_mask": F.pad(mask, (3, 0))}
    alone = model.generate(tokens, **GREEDY)[:, 6:]
    assert torch.equal(model.generate(**padded, **GREEDY)[:, 9:], alone)
    for filler in (0, 1):  # transformers may fill the positions of padding with either
        positions = (padded["attention_mask"].cumsum(-1) - 1).masked_fill(
            padded["attention_mask"] == 0, filler
        )
        logits = model(**padded, position_ids=positions).logits[:, -1]
        torch.testing.assert_close(logits, model(tokens).logits[:, -1], rtol=1e-7, atol=1e-8)


@every_block
@torch.no_grad()
def test_generation_starts_from_embeddings(name):
    model, tokens = build_with_large_head(name), make_ids(2, 6)
    embeds = model.get_input_embeddings()(tokens)
    expected = model.generate(tokens, **GREEDY)
    new_tokens = model.generate(inputs_embeds=embeds, **GREEDY)
    assert torch.equal(new_tokens, expected[:, 6:])
    assert torch.equal(model.generate(tokens, inputs_embeds=embeds, **GREEDY), expected)
    others = torch.zeros_like(embeds)
    assert not torch.equal(model.generate(inputs_embeds=others, **GREEDY), new_tokens)
    uncached = model.generate(inputs_embeds=embeds, **GREEDY, use_cache=False)
    assert torch.equal(uncached, new_tokens)


@every_block
def test_use_cache_of_the_config_decides(name):
    model = build_with_large_head(name)
    assert isinstance(model(make_ids()).past_key_values, FPRNNCache)
    assert model(make_ids(), use_cache=False).past_key_values is None
    assert model.train()(make_ids()).past_key_values is None
    assert isinstance(model(make_ids(), use_cache=True).past_key_values, FPRNNCache)
    model = build_with_large_head(name, use_cache=False)
    assert model(make_ids()).past_key_values is None
    assert isinstance(model(make_ids(), use_cache=True).past_key_values, FPRNNCache)
    generated = model.generate(make_ids(), **GREEDY, return_dict_in_generate=True)
    assert generated.past_key_values is None  # generate reads the same config
    output = model(make_ids(), return_state=True)
    assert output.past_key_values is None and output.state is not None


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValueError, match=r"not used by the model: \['lables'\]"):
        build_with_large_head("fp_mamba1").generate(make_ids(1, 6), lables=make_ids(1, 6), **GREEDY)


@few_models
def test_stop_strings_and_output_attentions_are_accepted(name, byte_tokenizer):
    tokenizer, model = AutoTokenizer.from_pretrained(byte_tokenizer), build_with_large_head(name)
    prompt, options = make_ids(1, 5), {**GREEDY, "min_new_tokens": 0, "eos_token_id": None}
    plain = model.generate(prompt, **options)
    words = [tokenizer.decode(token) for token in plain[0, 5:]]
    stop = next(word for word in words[1:] if word)
    stopped = model.generate(prompt, stop_strings=[stop], tokenizer=tokenizer, **options)
    assert stopped.tolist() == plain[:, : 6 + words.index(stop)].tolist()
    outputs = {"output_attentions": True, "return_dict_in_generate": True}
    output = model.generate(prompt, **outputs, **options)
    assert torch.equal(output.sequences, plain) and len(output.attentions) == 5
    assert model(prompt, output_attentions=True, return_dict=True).attentions is None
