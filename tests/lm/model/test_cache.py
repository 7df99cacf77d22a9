"""Decoding with an FPRNNCache, by hand and through `generate`, equals the full forward pass."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.dynamic_module_utils import get_relative_imports

from lm.export.export import write_export
from lm.model import modeling_fprnn
from lm.model.batch import CACHE
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import FPRNNCache
from tests.lm.model.test_state import BLOCKS, EOS, assert_same_state, ids, model_of, named_tensors
from tests.running import run_alone

# 24 tokens: the prompt, then chunks.
CUTS = {"1": (1, 4, 16, 1, 1, 1), "3": (3, 1, 16, 4), "17": (17, 1, 1, 4, 1)}
LOOSE = dict(schedule="sequential", eval_tol=0.1)  # which has no meaning for this block
GENERATING = ("fp_mamba1-conv", "fp_mamba2-conv-gate_inside", "fp_rnn-conv")
every_block = pytest.mark.parametrize("name", BLOCKS)
some_blocks = pytest.mark.parametrize("name", GENERATING)


def quick(name="fp_mamba1-conv", dtype=torch.float64, **kwargs):
    """Return a model that converges in about ten iterations, with varied greedy text."""
    sizes = dict(contractive=0.1, tie_embeddings=False)
    return model_of(dtype, **{**BLOCKS[name], **sizes, **kwargs})


def decode(model, tokens, sizes, cache=None, mask=None, **kwargs):
    """Return the logits of `tokens`, read in chunks, and the cache."""
    cache, logits, seen = FPRNNCache() if cache is None else cache, [], 0
    start = cache.get_seq_length()
    for chunk in tokens.split(sizes, 1):
        seen += chunk.shape[1]
        so_far = None if mask is None else mask[:, :seen]  # covers all tokens, as in `generate`
        out = model(chunk, attention_mask=so_far, past_key_values=cache, use_cache=True, **kwargs)
        assert out.past_key_values is cache and cache.get_seq_length() == start + seen
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


def generate(model, tokens=None, **kwargs):
    """Return sequences, logits of the new tokens, and lengths of the forward passes."""
    lengths = []

    def note(_, args, kwargs, __):
        given = kwargs.get("inputs_embeds")
        lengths.append((kwargs["input_ids"] if given is None else given).shape[1])

    hook = model.register_forward_hook(note, with_kwargs=True)
    sampling = dict(do_sample=False, max_new_tokens=8, pad_token_id=EOS)
    asked = dict(return_dict_in_generate=True, output_logits=True)
    torch.manual_seed(5)
    out = model.generate(tokens, **{**sampling, **asked, **kwargs})
    hook.remove()
    return out, torch.stack(out.logits, 1), lengths


def assert_cache_changes_nothing(model, tokens, at_least=4, **kwargs):
    cached, logits, lengths = generate(model, tokens, **kwargs)
    plain, others, whole = generate(model, tokens, use_cache=False, **kwargs)
    assert set(lengths[1:]) == {1} and lengths[0] == tokens.shape[1]
    assert whole == list(range(tokens.shape[1], tokens.shape[1] + len(whole)))
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(
        logits, others, rtol=0, atol=1e-6
    )  # `generate` converts them to fp32
    assert isinstance(cached.past_key_values, FPRNNCache) and plain.past_key_values is None
    assert cached.sequences[:, tokens.shape[1] :].unique().numel() >= at_least
    return cached


@every_block
@torch.no_grad()
def test_sequential_decoding_equals_one_pass_at_any_tolerance(name):
    model, tokens = quick(name, contractive=0.3, **LOOSE), ids()
    whole = model(tokens, use_cache=True)
    with model.solving(eval_tol=1e-6):
        assert torch.equal(model(tokens).logits, whole.logits)
    for sizes in CUTS.values():
        logits, cache = decode(model, tokens, sizes)
        torch.testing.assert_close(logits, whole.logits, rtol=0, atol=1e-12)
        assert_same_state(cache.state, whole.past_key_values.state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", ["window:4", "parallel", "auto"])
@every_block
@torch.no_grad()
def test_other_schedules_decode_within_the_tolerance(name, schedule):
    model, tokens = quick(name, schedule=schedule, eval_tol=1e-9), ids()
    whole = model(tokens, use_cache=False)
    assert (whole.fixed_point.failed == 0).all() and whole.past_key_values is None
    for sizes in CUTS.values():
        logits, _ = decode(model, tokens, sizes)
        torch.testing.assert_close(logits, whole.logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(schedule="parallel", stopping="paper", eval_tol=1e-9),
        dict(token="iterate", stopping="causal", schedule="window:4", eval_tol=1e-9),
        dict(schedule="sequential", block="fp_rnn", contractive=None),
        dict(gradient="one_step", n_backwards=3, eval_tol=1e-9),
    ],
    ids=["paper", "iterate", "exact", "n_backwards"],
)
def test_decoding_with_other_solvers_and_with_gradients(kwargs):
    model, tokens = quick(**kwargs), ids()
    whole = model(tokens).logits
    for sizes in CUTS.values():
        logits, cache = decode(model, tokens, sizes)
        assert logits.requires_grad and not any(
            t.requires_grad for _, t in named_tensors(cache.state)
        )
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-6)


@every_block
@torch.no_grad()
def test_left_padded_row_equals_the_row_alone(name):
    model, tokens = quick(name, **LOOSE), ids(3)
    alone = [model(tokens[i : i + 1, pad:]).logits for i, pad in enumerate((0, 7, 16))]
    mask = torch.ones_like(tokens)
    tokens[1, :7], mask[1, :7] = EOS, 0  # padded with the EOS token
    tokens[2, :16], mask[2, :16] = 3, 0
    logits, _ = decode(
        model, tokens, (5, 8, 4, 1, 6), mask=mask
    )  # some chunks contain only padding
    for i, pad in enumerate((0, 7, 16)):
        torch.testing.assert_close(logits[i : i + 1, pad:], alone[i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
def test_generation_continues_from_a_returned_cache(padded):
    model, tokens = quick(**LOOSE), ids(2, 6)
    mask = torch.ones_like(tokens)
    if padded:
        tokens[1, :4], mask[1, :4] = EOS, 0
    first = generate(model, tokens, attention_mask=mask, eos_token_id=None)[0]
    longer = torch.cat([first.sequences, ids(2, 3, seed=7)], 1)
    mask = F.pad(mask, (0, longer.shape[1] - mask.shape[1]), value=1)
    kwargs = dict(attention_mask=mask, eos_token_id=None)
    afresh, expected, _ = generate(model, longer, **kwargs)
    went_on, logits, lengths = generate(
        model, longer, past_key_values=first.past_key_values, **kwargs
    )
    assert lengths == [4] + [1] * 7  # last new token of the first call, and three more
    assert torch.equal(went_on.sequences, afresh.sequences)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("given", [True, False], ids=["into a cache", "without a cache"])
@pytest.mark.parametrize("beams", [1, 2])
def test_prompt_in_chunks_gives_the_same_text(given, beams):
    model, tokens = quick(**LOOSE), ids(2, 10)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    kwargs = dict(attention_mask=mask, num_beams=beams)
    cache = dict(past_key_values=FPRNNCache()) if given else {}
    chunked, _, lengths = generate(model, tokens, prefill_chunk_size=4, **cache, **kwargs)
    assert lengths[:3] == [4, 4, 2]
    assert torch.equal(chunked.sequences, generate(model, tokens, **kwargs)[0].sequences)
    assert chunked.past_key_values.get_seq_length() == chunked.sequences.shape[1] - 1
    with pytest.raises(ValueError, match="chunking without a cache"):
        generate(model, tokens, prefill_chunk_size=4, use_cache=False)


@pytest.mark.parametrize("schedule", ["sequential", "window:4", "parallel", "auto"])
@torch.no_grad()
def test_evaluation_draws_no_random_numbers(schedule):
    """Otherwise samples would depend on the schedule and on the chunks of the prompt."""
    model = quick(schedule=schedule)
    before = torch.get_rng_state()
    model(ids(1, 3))
    assert torch.equal(torch.get_rng_state(), before)


@every_block
@torch.no_grad()
def test_the_cache_does_not_grow(name):
    model, tokens = quick(name, schedule="parallel", eval_tol=0.1), ids(2, 50)

    def sizes(cache):
        for leaf, t in named_tensors(cache.state):
            assert t.untyped_storage().nbytes() == t.nbytes, (
                leaf
            )  # and no reference to the sequence
        return sum(t.numel() for _, t in named_tensors(cache.state))

    _, cache = decode(model, tokens[:, :1], (1,))
    after_one = sizes(cache)
    decode(model, tokens[:, 1:], (40, 1, 8), cache)
    assert cache.get_seq_length() == 50 and sizes(cache) == after_one


@every_block
@torch.no_grad()
def test_continuing_twice_from_one_state_gives_the_same(name):
    model, tokens = quick(name, **LOOSE), ids()
    _, cache = decode(model, tokens[:, :2], (2,))
    state, kept = cache.state, copy.deepcopy(cache)
    runs = [
        decode(model, tokens[:, 2:8], (1, 4, 1), given)
        for given in (FPRNNCache(state, 2), FPRNNCache(state, 2), copy.deepcopy(cache))
    ]
    for logits, ended in runs[1:]:
        assert torch.equal(logits, runs[0][0])
        assert_same_state(ended.state, runs[0][1].state, rtol=0, atol=0)
    assert cache.get_seq_length() == 2
    assert_same_state(state, kept.state, rtol=0, atol=0)  # no pass has changed it


@torch.no_grad()
def test_cache_rows_can_be_reordered_repeated_and_selected():
    model, tokens = quick("fp_rnn-conv", **LOOSE), ids(3, 12)
    _, cache = decode(model, tokens[:, :8], (8,))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([4, 1, 0]))  # rows 2, 0, 0
    cache.reorder_cache(torch.tensor([0, 2]))
    rows = tokens[[2, 0]]
    logits, _ = decode(model, rows[:, 8:], (1, 3), cache)
    torch.testing.assert_close(logits, model(rows).logits[:, 8:], rtol=0, atol=1e-12)


def test_cache_that_does_not_fit_is_refused():
    model, tokens = quick(**LOOSE), ids()
    out = model(tokens[:, :5], use_cache=True, return_state=True)
    cache, before = out.past_key_values, out.past_key_values.state

    def refused(match, model=model, tokens=tokens, past_key_values=cache, **kwargs):
        with pytest.raises(ValueError, match=match) as e:
            model(tokens, past_key_values=past_key_values, **kwargs)
        assert "\n" not in str(e.value)

    refused("state is of a batch of 2 sequences, the input has 3", tokens=ids(3))
    refused("a model with 2 layers, this one has 1", quick(n_layer=1))
    refused(r"layer 0 of the state has the shapes \[\(16,\)", quick(d_model=16))
    refused("is a DynamicCache, not an FPRNNCache", past_key_values=DynamicCache())
    refused("is a tuple, not an FPRNNCache", past_key_values=((tokens, tokens),))
    refused("is a FPRNNState, not an FPRNNCache", past_key_values=out.state)
    refused("one of state and past_key_values", state=out.state)
    with pytest.raises(ValueError, match=r"cannot be cropped \(to 3 tokens\)"):
        cache.crop(3)
    assert cache.state is before and cache.get_seq_length() == 5
    assert not (cache.is_croppable or cache.is_compileable)


@torch.no_grad()
def test_the_cache_of_another_block_is_refused():
    models = {name: quick(name) for name in BLOCKS}
    caches = {name: decode(model, ids(2, 1), (1,))[1] for name, model in models.items()}
    for name, model in models.items():
        for other, cache in caches.items():
            kinds = {re.sub("-(gate_inside|dt)$", "", each) for each in (name, other)}
            if len(kinds) == 1:  # gate and step size have no state
                continue
            with pytest.raises(ValueError, match="the state is of another model: layer 0"):
                decode(model, ids(2, 1), (1,), cache)
            assert cache.get_seq_length() == 1
    with pytest.raises(ValueError, match=r"\(16, 4\), \(3, 16\)\] per stream, and"):
        decode(quick(d_state=5), ids(2, 1), (1,), caches["fp_mamba1-conv"])


def test_assisted_generation_is_refused():
    model, tokens = quick(**LOOSE), ids(1, 6)
    for kwargs in (dict(prompt_lookup_num_tokens=2), dict(assistant_model=quick(**LOOSE))):
        for use_cache in (True, False):
            with pytest.raises(ValueError, match="assisted generation is not supported"):
                generate(model, tokens, use_cache=use_cache, **kwargs)


@pytest.mark.parametrize("name", ["fp_mamba1", *GENERATING])
@torch.no_grad()
def test_bf16_model_decodes_like_one_pass(name, tmp_path):
    quick(name, torch.float32, **LOOSE).save_pretrained(tmp_path)
    exact = FPRNNForCausalLM.from_pretrained(tmp_path).eval()(ids()).logits
    model = FPRNNForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for everything in (False, True):  # also the decay rates, which loading keeps in fp32
        model = model.to(torch.bfloat16) if everything else model
        whole = model(ids()).logits
        logits, cache = decode(model, ids(), CUTS["3"])
        assert (logits - whole).abs().max() < 0.03 * whole.abs().max()
        assert (logits - exact).abs().max() < 0.1 * exact.abs().max()
        assert all(s.y.dtype == s.h.dtype == torch.float32 for s in cache.state.layers)
    out, _, lengths = generate(model, ids(2, 6), eos_token_id=None, max_new_tokens=4)
    assert out.sequences.shape == (2, 10) and lengths == [6, 1, 1, 1]


ELSEWHERE = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
package = type(model).__module__.rpartition(".")[0]
assert package.startswith("transformers_modules") and "lm" not in sys.modules
assert sys.modules[package + ".scan"]._kernels().__name__.startswith("fprnn_kernels_")
ids = torch.tensor(json.loads(sys.argv[2]))
kwargs = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, return_dict_in_generate=True)
outs = [model.generate(ids, use_cache=c, **kwargs) for c in (True, False)]
cache = outs[0].past_key_values
print(json.dumps([[o.sequences.tolist() for o in outs], type(cache).__name__,
                  type(cache).__module__ == package + ".state", cache.get_seq_length()]))
"""


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(None, marks=pytest.mark.slow),
        "mamba gated_deltanet gated_deltaproduct fp_mamba1",
    ],
)
def test_export_decodes_without_the_package(tmp_path, layers):
    sizes = {"layers": layers, "n_layer": 4} if layers else {}
    model, tokens = quick(dtype=torch.float32, **LOOSE, **sizes), ids(2, 5)
    out = write_export(model, tmp_path / "out", None, "cached", "For a test.")
    done = run_alone(ELSEWHERE, out, json.dumps(tokens.tolist()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (cached, plain), cache, travelled, length = json.loads(done.stdout.splitlines()[-1])
    mine = generate(model, tokens, max_new_tokens=6)[0].sequences.tolist()
    assert cached == plain == mine and cache == "FPRNNCache" and travelled
    assert length == len(mine[0]) - 1


def test_export_has_every_file_and_modeling_imports_all(tmp_path):
    """transformers 4 loads only files that the modeling file itself imports."""
    modeling = Path(modeling_fprnn.__file__)
    files = {f.stem for f in modeling.parent.glob("*.py")} - {"__init__"}
    assert set(get_relative_imports(modeling)) == files - {modeling.stem}
    out = write_export(quick(dtype=torch.float32), tmp_path / "out", None, "x", "For a test.")
    assert {f.stem for f in out.glob("*.py")} - {"__init__"} == files


def test_cache_has_two_argument_names():
    """transformers names it `cache` from 5.24 on, and past_key_values before."""
    model = quick()
    tokens = ids()
    with torch.no_grad():
        first = model(tokens[:, :5], use_cache=True)
        assert isinstance(getattr(first, CACHE), FPRNNCache)
        copies = [copy.deepcopy(getattr(first, CACHE)) for _ in range(2)]
        rest = [
            model(tokens[:, 5:], **{n: c}) for n, c in zip(("cache", "past_key_values"), copies)
        ]
    assert torch.equal(rest[0].logits, rest[1].logits)
    torch.testing.assert_close(rest[0].logits, model(tokens).logits[:, 5:])
    with pytest.raises(ValueError, match="give one of cache and past_key_values"):
        model(tokens, cache=copies[0], past_key_values=copies[1])
