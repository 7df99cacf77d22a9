"""Each mixer against its matrix, written out from the definition."""

import pytest
import torch

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.mixers import WNLinear, build_mixer, largest_divisor, nrm
from tests.oracles import mixer_matrix

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
    "kronecker_prime": dict(mixer="kronecker", d_model=7, expand=1),  # 1 × 7
}


def randomised(name):
    torch.manual_seed(0)
    config = FPRNNConfig(**{"d_model": 6, **CASES[name]})
    mixer = build_mixer(config, config.d_inner, config.d_inner * 2).double()
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    return config, mixer


def apply(mixer, P, v):
    weights = mixer.weights()
    return mixer(torch.nn.functional.linear(P, weights.first, weights.bias), v, weights)


@pytest.mark.parametrize("name", CASES)
def test_equals_its_matrix(name):
    config, mixer = randomised(name)
    P = torch.randn(2, 3, 2 * config.d_inner, dtype=torch.float64)
    v = torch.randn(2, 3, config.d_inner, dtype=torch.float64)
    ours = apply(mixer, P, v)
    for b in range(2):
        for t in range(3):
            M = mixer_matrix(mixer, P[b, t], config)
            torch.testing.assert_close(ours[b, t], M @ v[b, t], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    config, mixer = randomised(name)
    P = torch.randn(1, 2, 2 * config.d_inner, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 2, config.d_inner, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda P, v: apply(mixer, P, v), (P, v))


@pytest.mark.parametrize("name", CASES)
def test_out_features_is_what_the_map_gives(name):
    _, mixer = randomised(name)
    assert mixer.weights().first.shape[0] == mixer.out_features == len(mixer.weights().bias)


def test_one_reflection_is_orthogonal_at_full_gate():
    config, mixer = randomised("householder1")
    with torch.no_grad():
        mixer.alpha_proj.bias.fill_(1e3)
    M = mixer_matrix(mixer, torch.randn(2 * config.d_inner, dtype=torch.float64), config)
    torch.testing.assert_close(M @ M.T, torch.eye(config.d_inner, dtype=M.dtype))


@pytest.mark.parametrize("d,m", [(16, 4), (12, 3), (7, 1), (1536, 32), (1, 1)])
def test_largest_divisor(d, m):
    assert largest_divisor(d) == m


def test_weight_norm_equals_torchs():
    torch.manual_seed(0)
    theirs = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(5, 3, bias=False))
    ours = WNLinear(5, 3)
    with torch.no_grad():
        ours.gain.copy_(theirs.parametrizations.weight.original0 * 2)
        ours.weight.copy_(theirs.parametrizations.weight.original1)
        theirs.parametrizations.weight.original0.mul_(2)
    torch.testing.assert_close(ours.matrix(), theirs.weight)


def test_nrm_does_not_divide_by_less_than_eps():
    v = torch.tensor([[3.0, 4.0], [3e-7, 4e-7], [0.0, 0.0]])
    torch.testing.assert_close(nrm(v, 1e-5), torch.tensor([[0.6, 0.8], [3e-2, 4e-2], [0.0, 0.0]]))


def test_unknown_mixer_is_refused():
    with pytest.raises(ValueError, match="unknown mixer `house`"):
        build_mixer(FPRNNConfig(mixer="house"), 8, 16)
