"""The model on a GPU: kernels against plain PyTorch, independence, decoding, waits of the host.

`FPRNN_TEST_DEVICE=cpu` runs all of it on the CPU at tiny sizes, with interpreted kernels.
"""

import functools
import os
import warnings

import pytest
import torch

from lm import kernels as backends
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.kernels import assert_close

DEVICE = os.environ.get("FPRNN_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []

VOCAB = 512 if ON_GPU else 30
B, L = (3, 80) if ON_GPU else (2, 12)  # the second of two chunks is a CUDA graph
SIZES = dict(d_model=128, n_layer=2, d_state=16, headdim=64)
if not ON_GPU:
    SIZES = dict(d_model=8, n_layer=2, d_state=4, headdim=8)
BLOCKS = {
    "fp_mamba1": {},
    "fp_mamba1-conv-gate_inside": dict(use_short_conv=True, glu_in_loop=True),
    "fp_mamba2": dict(
        block="fp_mamba2", mixer_rank=2
    ),  # kernels for two reflections compile longer
    "fp_mamba2-conv": dict(block="fp_mamba2", use_short_conv=True),
}
every_block = pytest.mark.parametrize("name", BLOCKS)
# One fixed point and a low tolerance, so that rounding on the path to it does not matter.
UNIQUE = dict(contractive=0.3, out_norm_epsilon=1.0, tol=1e-5, eval_tol=1e-5, schedule="auto")
# Iterations of each token, whatever rounding does to its residual.
ITERATIONS = 4
COUNTED = dict(
    schedule="parallel",
    tol=1e-30,
    eval_tol=1e-30,
    max_iters=ITERATIONS,
    eval_max_iters=ITERATIONS,
    contractive=0.5,
    out_norm_epsilon=0.1,
)


@pytest.fixture(autouse=True)
def exact_products():
    """Disable TF32, which cuDNN uses by default."""
    products = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    precisions = [product.fp32_precision for product in products]
    for product in products:
        product.fp32_precision = "ieee"
    yield
    for product, precision in zip(products, precisions):
        product.fp32_precision = precision


@pytest.fixture
def kernels(monkeypatch):
    """Return a function that chooses a backend by name; a backend that cannot run is an error."""
    if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on a CPU the kernels need TRITON_INTERPRET=1")
    pytest.importorskip("triton")
    return functools.partial(monkeypatch.setenv, "FPRNN_KERNELS")


def model_of(name, **kwargs):
    torch.manual_seed(0)
    fields = dict(vocab_size=VOCAB, eos_token_id=0, **SIZES)
    config = FPRNNConfig(**{**fields, **BLOCKS[name], **kwargs})
    return FPRNNForCausalLM(config).to(DEVICE)


def ids(b=B, length=L, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (b, length), generator=generator)
    tokens[0, length // 3] = 0  # end of a document
    return tokens.to(DEVICE)


def results(model, tokens, dtype):
    """Return logits, loss and every gradient by name."""
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = model(tokens, labels=tokens)
    out.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert None not in found.values()
    found |= {"logits": out.logits.detach(), "loss": out.loss.detach()}
    assert all(value.isfinite().all() for value in found.values())
    return found


# In bf16 the two round differently before the same product, and Triton's interpreter truncates.
# A sum over the 24 tokens of the CPU's tiny sizes does not hide this.
BF16_TOL = 6e-2 if ON_GPU else 0.15


@pytest.mark.parametrize(
    "dtype, tol", [(torch.float32, 2e-4), (torch.bfloat16, BF16_TOL)], ids=["fp32", "bf16"]
)
@every_block
def test_kernels_give_the_plain_outputs_and_gradients(name, dtype, tol, kernels):
    model, tokens = model_of(name, **COUNTED).train(), ids()
    kernels("plain")
    plain = results(model, tokens, dtype)
    kernels("triton")
    assert_close(results(model, tokens, dtype), plain, tol)


@every_block
def test_kernels_need_as_many_iterations(name, kernels):
    """The paper's procedure, at the tolerance of training.

    The mixer is contractive: otherwise rounding changes the path to the fixed point, and so the
    count (by a quarter in bf16 for untrained weights).
    """
    fields = dict(schedule="auto", contractive=0.5, out_norm_epsilon=0.1)
    model, tokens, found = model_of(name, **fields).train(), ids(), []
    for backend in ("plain", "triton"):
        kernels(backend)
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            found.append(model(tokens, count_iterations=True).fixed_point)
    plain, ours = (stats.token_iters.double().mean((1, 2)) for stats in found)
    torch.testing.assert_close(ours, plain, rtol=0.1, atol=0.0)
    assert max(stats.failed.max() for stats in found) < 0.01


@pytest.mark.skipif(not ON_GPU, reason="of a CPU's kernels other tests know")
def test_gpu_runs_every_triton_kernel():
    """No kernel fails its self-check, after which plain PyTorch would be used."""
    chosen = backends.choice("cuda")
    missing = [name for name in backends.MODULES["triton"] if "triton" not in chosen[name]]
    assert not missing, backends.available("cuda")


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


@every_block
def test_later_tokens_change_only_the_rounding(name):
    model, at = model_of(name, **UNIQUE).eval(), 2 * L // 3
    tokens, other = ids(), ids()
    other[:, at:] = ids(seed=1)[:, at:]
    one, two = logits(model, tokens), logits(model, other)
    assert_close({"before": two[:, :at]}, {"before": one[:, :at]}, 1e-3)
    assert (one[:, at:] - two[:, at:]).abs().max() > 1e-2


@every_block
def test_other_rows_change_only_the_rounding(name):
    model, tokens = model_of(name, **UNIQUE).eval(), ids()
    together = logits(model, tokens)
    for row in range(B):
        alone = logits(model, tokens[row : row + 1])
        assert_close({"row": alone}, {"row": together[row : row + 1]}, 1e-3)


@every_block
def test_generation_with_cache_gives_the_same_text(name):
    model = model_of(name, **{**UNIQUE, "tie_embeddings": False}).eval()
    prompt = ids(length=L // 3)
    asked = dict(do_sample=False, pad_token_id=0, eos_token_id=None, max_new_tokens=8)
    asked |= dict(return_dict_in_generate=True, output_logits=True)
    prompt[prompt == 0] = 1
    found = []
    for use_cache in (False, True):
        out = model.generate(prompt, use_cache=use_cache, **asked)
        found.append((out.sequences, torch.stack(out.logits, 1)))
    (plain, expected), (cached, values) = found
    assert torch.equal(cached, plain)
    assert_close({"logits": values}, {"logits": expected}, 1e-3)


def waits(model, tokens):
    """Count how often a forward pass makes the host wait for the GPU (on a CPU: never)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            model(tokens)
        finally:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


@pytest.mark.parametrize("stopping", ["causal", "paper"])
@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba2"])
def test_iteration_waits_for_the_device_at_most_once(name, stopping):
    """The host reads only its flags. Two solves that differ only in iterations are counted."""
    token = "exact" if stopping == "causal" else "iterate"
    model, tokens = model_of(name, **COUNTED, token=token, stopping=stopping).train(), ids()
    found = {}
    for iterations in (4, 4, 9):  # the first call compiles
        with model.solving(max_iters=iterations):
            found[iterations] = waits(model, tokens)
    assert found[9] - found[4] <= 5 * SIZES["n_layer"], found
    assert ON_GPU or found == {4: 0, 9: 0}
