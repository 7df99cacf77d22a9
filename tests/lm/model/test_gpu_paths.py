"""Code paths for GPUs, tested on a CPU: `is_on_cpu` is replaced by a function that returns False.

On such a device projections may be narrower than the results computed from them, and a single
`addmm` adds the part that reads sh(y).
"""

import copy

import pytest
import torch

from lm import kernels
from lm.kernels import Unsupported
from lm.model import layers
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.kernels import quicken_interpreter
from tests.marks import slow
from tests.tracker import compute_gradient, draw_words

pytestmark = pytest.mark.filterwarnings("ignore:.*(encountered|plain PyTorch):RuntimeWarning")
PAPER = dict(token="iterate", stopping="paper", gradient="one_step")


@pytest.fixture(autouse=True)
def off_cpu(monkeypatch):
    monkeypatch.setattr(layers, "is_on_cpu", lambda t: False)


def untrained(**fields):
    torch.manual_seed(0)
    sizes = dict(vocab_size=6, d_model=16, n_layer=1, d_state=4, tie_embeddings=False)
    return FPRNNForCausalLM(
        FPRNNConfig(**{**sizes, "mixer_gate_init_bias": -3.0, **fields})
    ).train()


def wrong(ours, theirs):
    """Return the relative distance of logits or of {name: gradient}."""

    def flat(found):
        tensors = found.values() if isinstance(found, dict) else [found]
        return torch.cat([t.flatten().float() for t in tensors])

    ours, theirs = flat(ours), flat(theirs)
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(
    "fields",
    [
        dict(schedule="sequential"),
        dict(schedule="sequential", dt_h_dep=True),
        dict(schedule="window:3"),
        dict(schedule="parallel", mixer="kronecker"),
        dict(schedule="parallel", **PAPER),
        dict(schedule="window:3", **PAPER | {"stopping": "causal"}),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_pytorch_agrees_for_weights_of_any_dtype(fields, dtype, monkeypatch):
    """With bf16 weights `raw` is in fp32 and the maps of y are in bf16."""
    monkeypatch.setenv("FPRNN_KERNELS", "plain")
    model = untrained(**fields).to(dtype)
    given = draw_words(2, 6)
    ours = compute_gradient(model, *given)
    monkeypatch.setattr(layers, "is_on_cpu", lambda t: True)
    loss, gradient = compute_gradient(model, *given)
    assert ours[0] == pytest.approx(loss, rel=1e-5 if dtype == torch.float32 else 0.02)
    assert wrong(ours[1], gradient) < (1e-4 if dtype == torch.float32 else 0.1)


def refusing(monkeypatch, *functions):
    """Make these functions of all backends refuse their arguments as unsupported."""
    real = kernels._find_modules

    def find(*args):
        return tuple(Refusing(module, functions) for module in real(*args))

    monkeypatch.setattr(kernels, "_find_modules", find)


class Refusing:
    """A backend's module with some functions that refuse."""

    def __init__(self, module, functions):
        self.module, self.functions = module, functions

    def __getattr__(self, name):
        if name in self.functions:
            return self.refuse
        return getattr(self.module, name)

    def refuse(self, *args):
        raise Unsupported("as within a CUDA graph of someone else")


@pytest.mark.parametrize("backend, dtype", [("cpu", torch.float32), ("triton", torch.bfloat16)])
def test_only_a_kernel_that_reads_bf16_gets_the_maps_of_y_in_bf16(backend, dtype, monkeypatch):
    monkeypatch.setenv("FPRNN_KERNELS", backend)
    block = untrained(schedule="sequential").backbone.layers[0].block
    with torch.autocast("cpu", torch.bfloat16):
        inputs = block.prepare(torch.randn(1, 3, 16))
    assert inputs.projections.weight_y.dtype == inputs.projections.raw.dtype == dtype


@pytest.mark.parametrize("rank", [2, slow(1)])
def test_bf16_rows_are_widened_if_a_kernel_refuses(rank, monkeypatch):
    """Plain PyTorch solves a token in fp32, whatever the dtype of its projections."""
    quicken_interpreter()
    monkeypatch.setenv("FPRNN_KERNELS", "triton")
    refusing(monkeypatch, "cell", "find_roots")
    model, given = untrained(mixer_rank=rank, schedule="sequential"), draw_words(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradient = compute_gradient(model, *given)
    monkeypatch.setenv("FPRNN_KERNELS", "plain")
    expected, its_gradient = compute_gradient(model, *given)
    assert loss == pytest.approx(expected, rel=0.02)
    assert wrong(gradient, its_gradient) < 0.1


@pytest.mark.slow
@torch.no_grad()
def test_decoding_after_windows_works_in_any_dtype(monkeypatch):
    """The cached weights are from the prompt's pass."""
    quicken_interpreter()
    monkeypatch.setenv("FPRNN_KERNELS", "triton")
    ids = draw_words(1, 4)[0]
    for fields in (dict(mixer_rank=2, mixer_proj_rank=3), dict(dt_h_dep=True)):
        model = untrained(schedule="window:3", **fields).eval()
        expected = model(ids).logits[:, 3:]
        for of_prompt, of_token in ((True, True), (True, False)):
            with torch.autocast("cpu", torch.bfloat16, enabled=of_prompt):
                cache = model(ids[:, :3], use_cache=True).past_key_values
            with torch.autocast("cpu", torch.bfloat16, enabled=of_token):
                anew = copy.deepcopy(cache)  # without cached weights
                logits = model(ids[:, 3:], past_key_values=cache).logits
                assert wrong(logits, model(ids[:, 3:], past_key_values=anew).logits) < 1e-5
            assert wrong(logits, expected) < 0.05
