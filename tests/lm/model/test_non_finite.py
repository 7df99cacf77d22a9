"""Tests that no pass returns NaN or infinity, and that gradients do not change a pass's output."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm import kernels
from lm.model import modeling_fprnn
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.solver import NonFiniteError
from tests.lm.model import test_state
from tests.marks import slow

MIXER_RANKS = {
    "householder": 2,
    "dplr": 2,
    "kronecker": 1,
    "monarch": 8,
    "nonselective": 1,
    "mixture": 3,
    "selective_dense": 1,
}
SOLVERS = {
    "paper": dict(schedule="parallel", stopping="paper"),
    **{name: dict(schedule=name) for name in ("parallel", "window:4", "auto", "sequential")},
}


def model_of(n_layer=1, seed=0, **fields):
    torch.manual_seed(seed)
    config = FPRNNConfig(vocab_size=40, d_model=16, n_layer=n_layer, **fields)
    return FPRNNForCausalLM(config)


def tokens(length=32, batch=3):
    return torch.randint(0, 40, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mixer", MIXER_RANKS)
@pytest.mark.parametrize("schedule", ["auto", slow("window:4")])
def test_fp_rnn_at_its_defaults_converges_with_every_mixer(mixer, schedule):
    is_slow = mixer in ("mixture", "selective_dense")
    ids = tokens(20 if is_slow else 100)
    for seed in range(1 if is_slow else 2):
        fields = dict(block="fp_rnn", mixer=mixer, mixer_rank=MIXER_RANKS[mixer], schedule=schedule)
        model = model_of(seed=seed, **fields)
        output = model(ids, labels=ids)
        output.loss.backward()
        assert (output.fixed_point.failed == 0).all()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_contractive_defaults_bound_fp_rnn_only():
    kronecker = FPRNNConfig(block="fp_rnn", mixer="kronecker")
    assert (kronecker.kronecker_norm, kronecker.contractive) == ("spectral", None)
    assert FPRNNConfig(mixer="kronecker").kronecker_norm == "rows"
    assert FPRNNConfig(mixer="nonselective").contractive is None
    assert FPRNNConfig(block="fp_rnn", mixer="nonselective").contractive == 0.95
    explicit = dict(kronecker_norm="rows", contractive=None)
    free = FPRNNConfig(block="fp_rnn", mixer="monarch", **explicit)
    loaded = FPRNNConfig.from_dict(free.to_dict())
    assert (loaded.kronecker_norm, loaded.contractive) == ("rows", None)


def make_diverging_model(mixer, solver, **limits):
    """Return an unbounded one-layer FP-RNN with parameters that make it diverge, or nearly so."""
    unbounded = dict(contractive=None, kronecker_norm="rows", mixer_rank=MIXER_RANKS[mixer])
    model = model_of(block="fp_rnn", mixer=mixer, **unbounded, **limits, **SOLVERS[solver])
    with torch.no_grad():
        for parameter in model.backbone.layers[0].block.mixer.parameters():
            parameter.mul_(3)
    return model


NAMED_CAUSE = r"^layer 0: .* Cause: .*mixer {} .*contractive null.* What helps: .*contractive"


@pytest.mark.parametrize(
    "solver", ["paper", "auto", *(slow(name) for name in ("parallel", "window:4", "sequential"))]
)
def test_divergence_error_names_layer_cause_and_cure(solver):
    model, ids = make_diverging_model("nonselective", solver), tokens(80, batch=1)
    calls = (
        lambda: model(ids),
        lambda: model(ids, labels=ids),
        lambda: model(ids, labels=ids, loss_only=True),
        lambda: model.eval()(ids),
        lambda: torch.no_grad()(model)(ids),
        lambda: model.backbone(ids),
        lambda: model.generate(ids, max_new_tokens=2),
    )
    with_labels, generate = calls[1], calls[6]
    for call in calls if solver == "paper" else (with_labels, generate):
        with pytest.raises(NonFiniteError, match=NAMED_CAUSE.format("nonselective")):
            call()


@pytest.mark.parametrize(
    "mixer, solver",
    [
        (mixer, solver) if (i + j) % 4 == 0 and mixer != "monarch" else slow(mixer, solver)
        for i, mixer in enumerate(["kronecker", "monarch", "mixture", "householder"])
        for j, solver in enumerate(SOLVERS)
        if (i + j) % 2 == 0
    ],
)
def test_nonfinite_output_is_refused(mixer, solver):
    model, ids = make_diverging_model(mixer, solver, max_iters=60), tokens(30)
    try:
        output = model(ids, labels=ids)
    except NonFiniteError as error:
        assert re.search(NAMED_CAUSE.format(mixer), str(error)), error
    else:
        assert output.loss.isfinite() and output.logits.isfinite().all()


@pytest.mark.parametrize(
    "parameter, place",
    [
        ("backbone.embeddings.weight", "the embedded input"),
        ("backbone.layers.1.norm.weight", "layer 1"),
        ("backbone.layers.1.block.out_proj.weight", "layer 1"),
        ("backbone.layers.0.block.mixer.u_proj.gain", "layer 0"),
        ("backbone.norm_f.weight", "the final norm"),
        ("lm_head.weight", "the head"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("use_cache", [True, False])  # False: the head reads all flags
def test_damaged_parameter_is_named(parameter, place, value, use_cache):
    model = model_of(n_layer=2, tie_embeddings=False).eval()
    half_of_embedding = 16 * 40 // 2  # entries: some of the 40 tokens read undamaged rows
    with torch.no_grad():
        model.get_parameter(parameter).view(-1)[:half_of_embedding] = value
    with pytest.raises(NonFiniteError, match=rf"^{place}: .*parameter .*NaN or infinite"):
        model(tokens(), use_cache=use_cache)


def test_pass_without_the_large_embedding_is_finite():
    model = model_of().eval()
    with torch.no_grad():
        model.backbone.embeddings.weight[39] = 1e4
    assert model(tokens().clamp_max(38)).logits.isfinite().all()


GRADIENTS = {
    "exact": dict(),
    "one_step": dict(gradient="one_step"),
    "three_steps": dict(gradient="one_step", n_backwards=3),
    "implicit": dict(gradient="implicit"),
}


@pytest.mark.parametrize(
    "block, gradient, solver",
    [
        (("fp_mamba1", "fp_mamba2", "fp_rnn")[(i + j) % 3], gradient, solver)
        for i, gradient in enumerate(GRADIENTS)
        for j, solver in enumerate(SOLVERS)
    ],
)
def test_output_is_the_same_with_and_without_gradients(block, gradient, solver):
    fields = dict(block=block, headdim=8, tol=0.1, eval_tol=0.1, **GRADIENTS[gradient])
    model = model_of(n_layer=2, **fields, **SOLVERS[solver]).double().eval()
    ids = tokens(length=14, batch=2)
    with_gradients = model(ids, return_state=True)
    with torch.no_grad():
        without = model(ids, return_state=True)
    torch.testing.assert_close(without.logits, with_gradients.logits, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(without.state.layers, with_gradients.state.layers):
        for name, a, b in zip(ours._fields, ours, theirs):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=name)


def test_more_gradient_steps_are_closer_to_the_implicit_gradient():
    grads = {}
    for name, fields in GRADIENTS.items():
        model = model_of(schedule="auto", tol=0.1, contractive=0.5, **fields).double()
        model(tokens(), labels=tokens()).loss.backward()
        grads[name] = model.backbone.layers[0].block.in_proj.weight.grad
    assert (grads["three_steps"] - grads["one_step"]).norm() > 1e-3 * grads["one_step"].norm()
    # More steps are closer to the true gradient.
    errors = {name: (grad - grads["implicit"]).norm() for name, grad in grads.items()}
    assert errors["three_steps"] < errors["one_step"]


class HostReads(TorchDispatchMode):
    """Count the places at which the host waits for numbers of a tensor.

    On a CPU `cpu` and `tolist` dispatch nothing, so both are patched.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        for name in ("cpu", "tolist"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method):
        def counted(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


KERNEL = pytest.mark.skipif(
    kernels.find("cell", torch.empty(1)) is None, reason="no compiler: the plain solve reads flags"
)


@pytest.mark.parametrize("loss_only", [True, False])
@pytest.mark.parametrize("layer", ["mamba", pytest.param("fp_mamba1", marks=KERNEL)])
@pytest.mark.parametrize("n_layer, eos", [(1, None), (5, None), (2, 39)])
def test_forward_and_backward_wait_for_the_device_once(monkeypatch, n_layer, eos, layer, loss_only):
    """Also with an EOS token that starts documents."""
    monkeypatch.setattr(modeling_fprnn, "is_on_cpu", lambda t: False)
    model = model_of(n_layer=n_layer, layers=" ".join([layer] * n_layer), eos_token_id=eos)
    ids = tokens(8)
    model(ids, labels=ids, loss_only=loss_only).loss.backward()  # the first call checks the kernels
    with HostReads(monkeypatch) as reads:
        model(ids, labels=ids, loss_only=loss_only).loss.backward()
    assert reads.count == 1


@pytest.mark.parametrize("name", ["fp_mamba1-conv", "fp_mamba2", "fp_rnn"])
def test_document_starts_are_not_checked_on_a_gpu(name, monkeypatch):
    """No token is an EOS token. In fp64 all solves agree to the last digits."""
    model, ids = test_state.model_of(**test_state.BLOCKS[name]).train(), test_state.ids(length=9)
    results = []
    for is_cpu in (True, False):
        monkeypatch.setattr(modeling_fprnn, "is_on_cpu", lambda t, is_cpu=is_cpu: is_cpu)
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_backbone_with_deferred_check_returns_flags():
    model = model_of(n_layer=2)
    with torch.no_grad():
        model.backbone.layers[1].block.out_proj.weight.fill_(torch.inf)
    output = model.backbone(tokens(), defer_check=True)
    assert output.is_finite.tolist() == [True, True, False, False]
    with pytest.raises(NonFiniteError, match=r"^layer 1: .*out_proj"):
        model.backbone.refuse_nonfinite(output.is_finite)


def test_refused_pass_does_not_change_the_cache():
    model = model_of(n_layer=2).eval()
    cache = model(tokens(), use_cache=True).past_key_values
    state, length = cache.state, cache.length
    with torch.no_grad():
        model.backbone.norm_f.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"^the final norm: "):
        model(tokens(1), past_key_values=cache)
    assert cache.state is state and cache.length == length
