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

# 24 tokens: the prompt, then chunks. The name is the length of the prompt.
CHUNK_SIZES = {"1": (1, 4, 16, 1, 1, 1), "3": (3, 1, 16, 4), "17": (17, 1, 1, 4, 1)}
SEQUENTIAL = dict(schedule="sequential", eval_tol=0.1)  # this schedule ignores the tolerance
SOME_BLOCKS = ("fp_mamba1-conv", "fp_mamba2-conv", "fp_rnn-conv")
every_block = pytest.mark.parametrize("name", BLOCKS)
some_blocks = pytest.mark.parametrize("name", SOME_BLOCKS)


def make_model(name="fp_mamba1-conv", dtype=torch.float64, **kwargs):
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

    def record_length(module, args, kwargs, output):
        embeds = kwargs.get("inputs_embeds")
        lengths.append((kwargs["input_ids"] if embeds is None else embeds).shape[1])

    hook = model.register_forward_hook(record_length, with_kwargs=True)
    sampling = dict(do_sample=False, max_new_tokens=8, pad_token_id=EOS)
    results = dict(return_dict_in_generate=True, output_logits=True)
    torch.manual_seed(5)
    out = model.generate(tokens, **{**sampling, **results, **kwargs})
    hook.remove()
    return out, torch.stack(out.logits, 1), lengths


@every_block
@torch.no_grad()
def test_sequential_decoding_equals_one_pass_at_any_tolerance(name):
    model, tokens = make_model(name, contractive=0.3, **SEQUENTIAL), ids()
    whole = model(tokens, use_cache=True)
    with model.solving(eval_tol=1e-6):
        assert torch.equal(model(tokens).logits, whole.logits)
    for sizes in CHUNK_SIZES.values():
        logits, cache = decode(model, tokens, sizes)
        torch.testing.assert_close(logits, whole.logits, rtol=0, atol=1e-12)
        assert_same_state(cache.state, whole.past_key_values.state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", ["window:4", "parallel", "auto"])
@every_block
@torch.no_grad()
def test_other_schedules_decode_within_the_tolerance(name, schedule):
    model, tokens = make_model(name, schedule=schedule, eval_tol=1e-9), ids()
    whole = model(tokens, use_cache=False)
    assert (whole.fixed_point.failed == 0).all() and whole.past_key_values is None
    for sizes in CHUNK_SIZES.values():
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
    model, tokens = make_model(**kwargs), ids()
    whole = model(tokens).logits
    for sizes in CHUNK_SIZES.values():
        logits, cache = decode(model, tokens, sizes)
        assert logits.requires_grad and not any(
            t.requires_grad for _, t in named_tensors(cache.state)
        )
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-6)


@every_block
@torch.no_grad()
def test_left_padded_row_equals_the_row_alone(name):
    model, tokens = make_model(name, **SEQUENTIAL), ids(3)
    alone = [model(tokens[i : i + 1, pad:]).logits for i, pad in enumerate((0, 7, 16))]
    mask = torch.ones_like(tokens)
    tokens[1, :7], mask[1, :7] = EOS, 0  # padded with the EOS token
    tokens[2, :16], mask[2, :16] = 3, 0
    # In row 2 the first chunk contains only padding.
    logits, _ = decode(model, tokens, (5, 8, 4, 1, 6), mask=mask)
    for i, pad in enumerate((0, 7, 16)):
        torch.testing.assert_close(logits[i : i + 1, pad:], alone[i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
def test_generation_continues_from_a_returned_cache(padded):
    model, tokens = make_model(**SEQUENTIAL), ids(2, 6)
    mask = torch.ones_like(tokens)
    if padded:
        tokens[1, :4], mask[1, :4] = EOS, 0
    first = generate(model, tokens, attention_mask=mask, eos_token_id=None)[0]
    longer = torch.cat([first.sequences, ids(2, 3, seed=7)], 1)
    mask = F.pad(mask, (0, longer.shape[1] - mask.shape[1]), value=1)
    kwargs = dict(attention_mask=mask, eos_token_id=None)
    from_scratch, expected, _ = generate(model, longer, **kwargs)
    continued, logits, lengths = generate(
        model, longer, past_key_values=first.past_key_values, **kwargs
    )
    assert lengths == [4] + [1] * 7  # last new token of the first call, and three more
    assert torch.equal(continued.sequences, from_scratch.sequences)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("has_cache", [True, False], ids=["into a cache", "without a cache"])
@pytest.mark.parametrize("beams", [1, 2])
def test_prompt_in_chunks_gives_the_same_text(has_cache, beams):
    model, tokens = make_model(**SEQUENTIAL), ids(2, 10)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    kwargs = dict(attention_mask=mask, num_beams=beams)
    cache = dict(past_key_values=FPRNNCache()) if has_cache else {}
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
    model = make_model(schedule=schedule)
    before = torch.get_rng_state()
    model(ids(1, 3))
    assert torch.equal(torch.get_rng_state(), before)


@every_block
@torch.no_grad()
def test_the_cache_does_not_grow(name):
    model, tokens = make_model(name, schedule="parallel", eval_tol=0.1), ids(2, 50)

    def sizes(cache):
        for tensor_name, t in named_tensors(cache.state):
            # A view would keep the memory of the whole sequence alive.
            assert t.untyped_storage().nbytes() == t.nbytes, tensor_name
        return sum(t.numel() for _, t in named_tensors(cache.state))

    _, cache = decode(model, tokens[:, :1], (1,))
    after_one = sizes(cache)
    decode(model, tokens[:, 1:], (40, 1, 8), cache)
    assert cache.get_seq_length() == 50 and sizes(cache) == after_one


@every_block
@torch.no_grad()
def test_continuing_twice_from_one_state_gives_the_same(name):
    model, tokens = make_model(name, **SEQUENTIAL), ids()
    _, cache = decode(model, tokens[:, :2], (2,))
    state, original = cache.state, copy.deepcopy(cache)
    runs = [
        decode(model, tokens[:, 2:8], (1, 4, 1), start)
        for start in (FPRNNCache(state, 2), FPRNNCache(state, 2), copy.deepcopy(cache))
    ]
    for logits, end in runs[1:]:
        assert torch.equal(logits, runs[0][0])
        assert_same_state(end.state, runs[0][1].state, rtol=0, atol=0)
    assert cache.get_seq_length() == 2
    assert_same_state(state, original.state, rtol=0, atol=0)  # no pass has changed it


@torch.no_grad()
def test_cache_rows_can_be_reordered():
    model, tokens = make_model("fp_rnn-conv", **SEQUENTIAL), ids(3, 12)
    _, cache = decode(model, tokens[:, :8], (8,))
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.reorder_cache(torch.tensor([0, 2]))
    rows = tokens[[2, 0]]
    logits, _ = decode(model, rows[:, 8:], (1, 3), cache)
    torch.testing.assert_close(logits, model(rows).logits[:, 8:], rtol=0, atol=1e-12)


def test_cache_that_does_not_fit_is_refused():
    model, tokens = make_model(**SEQUENTIAL), ids()
    out = model(tokens[:, :5], use_cache=True, return_state=True)
    cache, before = out.past_key_values, out.past_key_values.state

    def assert_refused(match, model=model, tokens=tokens, past_key_values=cache, **kwargs):
        with pytest.raises(ValueError, match=match) as e:
            model(tokens, past_key_values=past_key_values, **kwargs)
        assert "\n" not in str(e.value)

    assert_refused("state is of a batch of 2 sequences, the input has 3", tokens=ids(3))
    assert_refused("a model with 2 layers, this one has 1", make_model(n_layer=1))
    assert_refused(r"layer 0 of the state has the shapes \[\(16,\)", make_model(d_model=16))
    assert_refused("is a DynamicCache, not an FPRNNCache", past_key_values=DynamicCache())
    assert_refused("is a tuple, not an FPRNNCache", past_key_values=((tokens, tokens),))
    assert_refused("is a FPRNNState, not an FPRNNCache", past_key_values=out.state)
    assert_refused("one of state and past_key_values", state=out.state)
    with pytest.raises(ValueError, match=r"cannot be cropped \(to 3 tokens\)"):
        cache.crop(3)
    assert cache.state is before and cache.get_seq_length() == 5
    assert not (cache.is_croppable or cache.is_compileable)


@torch.no_grad()
def test_the_cache_of_another_block_is_refused():
    models = {name: make_model(name) for name in BLOCKS}
    caches = {name: decode(model, ids(2, 1), (1,))[1] for name, model in models.items()}
    for name, model in models.items():
        for other, cache in caches.items():
            has_same_state = re.sub("-(gate_inside|dt)$", "", name) == re.sub(
                "-(gate_inside|dt)$", "", other
            )  # gate and step size have no state
            if has_same_state:
                continue
            with pytest.raises(ValueError, match="the state is of another model: layer 0"):
                decode(model, ids(2, 1), (1,), cache)
            assert cache.get_seq_length() == 1
    with pytest.raises(ValueError, match=r"\(16, 4\), \(3, 16\)\] per stream, and"):
        decode(make_model(d_state=5), ids(2, 1), (1,), caches["fp_mamba1-conv"])


def test_assisted_generation_is_refused():
    model, tokens = make_model(**SEQUENTIAL), ids(1, 6)
    for kwargs in (
        dict(prompt_lookup_num_tokens=2),
        dict(assistant_model=make_model(**SEQUENTIAL)),
    ):
        for use_cache in (True, False):
            with pytest.raises(ValueError, match="assisted generation is not supported"):
                generate(model, tokens, use_cache=use_cache, **kwargs)


@pytest.mark.parametrize("name", ["fp_mamba1", *SOME_BLOCKS])
@torch.no_grad()
def test_bf16_model_decodes_like_one_pass(name, tmp_path):
    make_model(name, torch.float32, **SEQUENTIAL).save_pretrained(tmp_path)
    exact = FPRNNForCausalLM.from_pretrained(tmp_path).eval()(ids()).logits
    model = FPRNNForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for is_all_bf16 in (False, True):  # True: also the decay rates, which loading keeps in fp32
        model = model.to(torch.bfloat16) if is_all_bf16 else model
        whole = model(ids()).logits
        logits, cache = decode(model, ids(), CHUNK_SIZES["3"])
        assert (logits - whole).abs().max() < 0.03 * whole.abs().max()
        assert (logits - exact).abs().max() < 0.1 * exact.abs().max()
        assert all(s.y.dtype == s.h.dtype == torch.float32 for s in cache.state.layers)
    out, _, lengths = generate(model, ids(2, 6), eos_token_id=None, max_new_tokens=4)
    assert out.sequences.shape == (2, 10) and lengths == [6, 1, 1, 1]


GENERATE_FROM_EXPORT = """
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
    model, tokens = make_model(dtype=torch.float32, **SEQUENTIAL, **sizes), ids(2, 5)
    out = write_export(model, tmp_path / "out", None, "cached", "For a test.")
    process = run_alone(GENERATE_FROM_EXPORT, out, json.dumps(tokens.tolist()), cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    (cached, plain), cache_class, is_exported_class, length = json.loads(
        process.stdout.splitlines()[-1]
    )
    expected = generate(model, tokens, max_new_tokens=6)[0].sequences.tolist()
    assert cached == plain == expected
    assert cache_class == "FPRNNCache" and is_exported_class
    assert length == len(expected[0]) - 1


def test_export_has_every_file_and_modeling_imports_all(tmp_path):
    """transformers 4 loads only files that the modeling file itself imports."""
    modeling = Path(modeling_fprnn.__file__)
    files = {f.stem for f in modeling.parent.glob("*.py")} - {"__init__"}
    assert set(get_relative_imports(modeling)) == files - {modeling.stem}
    out = write_export(make_model(dtype=torch.float32), tmp_path / "out", None, "x", "For a test.")
    assert {f.stem for f in out.glob("*.py")} - {"__init__"} == files


def test_cache_has_two_argument_names():
    """transformers names it `cache` from 5.24 on, and past_key_values before."""
    model = make_model()
    tokens = ids()
    with torch.no_grad():
        first = model(tokens[:, :5], use_cache=True)
        assert isinstance(getattr(first, CACHE), FPRNNCache)
        copies = [copy.deepcopy(getattr(first, CACHE)) for _ in range(2)]
        new_name = model(tokens[:, 5:], cache=copies[0])
        old_name = model(tokens[:, 5:], past_key_values=copies[1])
    assert torch.equal(new_name.logits, old_name.logits)
    torch.testing.assert_close(new_name.logits, model(tokens).logits[:, 5:])
    with pytest.raises(ValueError, match="give one of cache and past_key_values"):
        model(tokens, cache=copies[0], past_key_values=copies[1])
