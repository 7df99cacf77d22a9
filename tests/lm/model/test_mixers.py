"""Each mixer against its matrix, written out from the definition."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lm.kernels.cpu import cpu_cell
from lm.model import scan
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.mixers import build_mixer, largest_divisor, largest_eigenvalue, largest_stretch, nrm
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.kernels import skip_if_missing
from tests.oracles import mixer_matrix

# Fields of FPRNNConfig; d_model is 6 unless a case sets it, so d_inner is 12.
CASES = {
    "householder1": dict(mixer="householder"),
    "householder3": dict(mixer="householder", mixer_rank=3),
    "householder2_lowrank": dict(mixer="householder", mixer_rank=2, mixer_proj_rank=5),
    "householder_relu": dict(mixer="householder", mixer_rank=2, mixer_act="relu"),
    "householder_identity": dict(mixer="householder", mixer_rank=2, mixer_act="identity"),
    "dplr3": dict(mixer="dplr", mixer_rank=3),
    "dplr2_lowrank": dict(mixer="dplr", mixer_rank=2, mixer_proj_rank=3),
    "kronecker_square": dict(mixer="kronecker", d_model=8),  # d_inner 16 = 4 × 4
    "kronecker": dict(mixer="kronecker", d_model=6),  # d_inner 12 = 3 × 4
    "householder_positive": dict(mixer="householder", mixer_rank=2, eigen_range="positive"),
    "kronecker_spectral": dict(mixer="kronecker", kronecker_norm="spectral"),
    "monarch": dict(mixer="monarch", mixer_rank=4),
    "monarch_positive": dict(mixer="monarch", mixer_rank=3, eigen_range="positive"),
    "nonselective": dict(mixer="nonselective"),
    "mixture": dict(mixer="mixture", mixer_rank=3),
    "selective_dense": dict(mixer="selective_dense"),
    "contractive_householder": dict(mixer="householder", mixer_rank=2, contractive=0.7),
    "contractive_dplr": dict(mixer="dplr", mixer_rank=2, contractive=0.5),
    "contractive_kronecker": dict(mixer="kronecker", contractive=0.6),
    "contractive_monarch": dict(mixer="monarch", mixer_rank=4, contractive=0.4),
    "contractive_nonselective": dict(mixer="nonselective", contractive=0.8),
    "contractive_mixture": dict(mixer="mixture", mixer_rank=2, contractive=0.5),
    "kronecker_prime": dict(mixer="kronecker", d_model=7, expand=1),  # 1 × 7
}


def randomised(name):
    """Return the config and the mixer of a case, in fp64 with random parameters."""
    torch.manual_seed(0)
    config = FPRNNConfig(**{"d_model": 6, **CASES[name]})
    mixer = build_mixer(config, config.d_inner, d_arg=2 * config.d_inner).double()
    for tensor in (*mixer.parameters(), *mixer.buffers()):
        torch.nn.init.normal_(tensor)
    return config, mixer


def apply(mixer, P, v):
    """Return M(P; v)."""
    weights = mixer.weights(P)
    return mixer(F.linear(P, weights.matrix, weights.bias), v, weights)


@pytest.mark.parametrize("name", CASES)
def test_mixer_equals_the_oracles_matrix(name):
    config, mixer = randomised(name)
    P = torch.randn(2, 3, 2 * config.d_inner, dtype=torch.float64)
    v = torch.randn(2, 3, config.d_inner, dtype=torch.float64)
    mixed, matrices = apply(mixer, P, v), mixer.matrix(P)
    for b in range(2):
        for t in range(3):
            Q = mixer_matrix(mixer.state_dict(), P[b, t], config)
            torch.testing.assert_close(mixed[b, t], Q @ v[b, t], rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(matrices[b, t], Q, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_out_features_is_the_height_of_the_map(name):
    config, mixer = randomised(name)
    weights = mixer.weights(torch.zeros(1, dtype=torch.float64))
    assert weights.matrix.shape == (mixer.out_features, 2 * config.d_inner)
    assert len(weights.bias) == mixer.out_features


@pytest.mark.parametrize("has_biases", [False, True], ids=["as_built", "with_an_adapters_biases"])
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("lowrank")])
def test_merged_layers_are_the_same_map(name, has_biases):
    """An adapter such as LoRA may replace the two layers by layers with biases."""
    config, mixer = randomised(name)
    if has_biases:
        for part in ("u_down", "u_proj"):
            old = getattr(mixer, part)
            setattr(mixer, part, nn.Linear(old.in_features, old.out_features).double())
    P = torch.randn(2, 3, 2 * config.d_inner, dtype=torch.float64)
    v = torch.randn(2, 3, config.d_inner, dtype=torch.float64)
    parameters = [p for p in mixer.parameters() if p.requires_grad]
    results = []
    for is_merged in (True, False):
        weights = mixer.merge_extra(mixer.weights(P)) if is_merged else mixer.weights(P)
        assert bool(weights.extra) is not is_merged
        mixed = mixer(F.linear(P, weights.matrix, weights.bias), v, weights)
        results.append([mixed, *torch.autograd.grad(mixed.sin().sum(), parameters)])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("block", ["fp_mamba1", "fp_mamba2", "fp_rnn"])
def test_low_rank_vectors_are_solved_by_the_compiled_cell(block, monkeypatch):
    skip_if_missing(cpu_cell)
    torch.manual_seed(0)
    sizes = dict(vocab_size=11, d_model=8, n_layer=2, headdim=8, mixer_rank=2, mixer_proj_rank=3)
    config = FPRNNConfig(**sizes, block=block, contractive=0.7)
    model = FPRNNForCausalLM(config).double()
    ids = torch.randint(11, (2, 9))
    cell, results = Mock(wraps=cpu_cell.cell), []
    monkeypatch.setattr(cpu_cell, "cell", cell)
    for _ in ("compiled", "plain PyTorch"):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append({"loss": loss.detach(), **grads})
        assert cell.call_count == config.n_layer  # the second pass calls no kernel
        monkeypatch.setattr(scan, "_kernels", lambda: None)
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


def norms(mixer, P):
    """Return ‖I − Q‖₂ for each row of P."""
    eye = torch.eye(mixer.d_inner, dtype=P.dtype)
    return torch.linalg.matrix_norm(eye - mixer.matrix(P), ord=2)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("contractive")])
def test_contractive_bounds_the_norm(name):
    config, mixer = randomised(name)
    P = 5 * torch.randn(50, 2 * config.d_inner, dtype=torch.float64)
    assert norms(mixer, P).max() <= config.contractive + 1e-9
    assert norms(mixer.mixer, P).max() > config.contractive  # without the wrapper


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("contractive")])
def test_the_bound_is_above_the_norm(name):
    config, mixer = randomised(name)
    P = 5 * torch.randn(50, 2 * config.d_inner, dtype=torch.float64)
    weights = mixer.weights(P)
    raw = F.linear(P, weights.matrix, weights.bias)
    norm, bound = norms(mixer, P), mixer.bound(raw, weights).squeeze(-1)
    assert (norm <= bound * (1 + 1e-12)).all()
    assert (bound <= 12 * norm.clamp_min(0.1)).all()  # not so large that it is useless


def test_power_iterations_find_the_largest_eigenvalue():
    T = torch.randn(3, 5, 8, dtype=torch.float64)
    S = T @ T.transpose(-1, -2)
    exact = torch.linalg.eigvalsh(S)[..., -1]
    torch.testing.assert_close(largest_eigenvalue(S, steps=400)[..., 0, 0], exact)
    stretch = largest_stretch(S, steps=400, eps=1e-3)[..., 0, 0]
    torch.testing.assert_close(stretch + 1e-3, exact)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(mixer="monarch", mixer_rank=5),
            "mixer_rank is 5: .* d_inner .* = 12, for example [46]",
        ),
        (dict(mixer="selective_dense", d_model=200), "at most 256"),
        (dict(mixer="kronecker", mixer_proj_rank=4), "mixer_proj_rank is only for householder"),
    ],
)
def test_impossible_sizes_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FPRNNConfig(**{"d_model": 6, **settings})


@pytest.mark.parametrize("d, m", [(16, 4), (12, 3), (7, 1), (1536, 32), (1, 1)])
def test_largest_divisor(d, m):
    assert largest_divisor(d) == m


def test_nrm_does_not_divide_by_less_than_eps():
    v = torch.tensor([[3.0, 4.0], [3e-7, 4e-7], [0.0, 0.0]])
    torch.testing.assert_close(nrm(v, 1e-5), torch.tensor([[0.6, 0.8], [3e-2, 4e-2], [0.0, 0.0]]))


def test_unknown_mixer_is_refused():
    with pytest.raises(ValueError, match="unknown mixer `house`"):
        build_mixer(FPRNNConfig(mixer="house"), d_inner=8, d_arg=16)
