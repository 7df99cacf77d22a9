"""Tests of `state_noise` and the Adversary in LSTM and sLSTM: noise on the state that is read."""

import pytest
import torch
import torch.nn.functional as F

from lm.common.errors import ConfigError
from lm.config.model import Model, Solver
from lm.config.schema import Config, check_state_noise
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import Adversary, Sequences
from lm.training.build import STACKS, check_section

SIGMA, LENGTH, D = 0.3, 9, 8
KINDS = ("lstm", "slstm")


def model_of(kind, centroids=0, **fields):
    torch.manual_seed(0)
    config = FPRNNConfig(
        vocab_size=13,
        d_model=D,
        n_layer=1,
        n_heads=2,
        layers=kind,
        eos_token_id=0,
        state_centroids=centroids,
        **fields,
    )
    model = FPRNNForCausalLM(config).double().train()
    block = model.backbone.layers[0].block
    if kind == "slstm":  # zero at initialization, so that no gate would read the state
        torch.nn.init.normal_(block.recurrent, std=0.5)
    if centroids:
        torch.nn.init.normal_(block.centroids.keys, std=0.2)
        torch.nn.init.normal_(block.centroids.key_bias)
    return model


def tokens():
    ids = torch.randint(1, 13, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[1, 5] = 0  # end of a document
    return ids


def sample_noise(sigma=SIGMA, seed=2):
    """Return the noise that a one-layer model draws in its first pass after this seed."""
    torch.manual_seed(seed)
    noise = torch.randn(2, LENGTH, D)
    return sigma * torch.rand(2, 1, 1) * noise


def read_lstm(block, state, noise):
    h, c = state
    if block.centroids is None:
        return h + noise, c
    if not h.any():
        return h, c
    vector = torch.cat([h + noise, c])
    weights = torch.softmax(block.centroids.keys @ vector + block.centroids.key_bias, 0)
    return (weights @ block.centroids.vectors).chunk(2)


def run_lstm_oracle(block, inputs, noise, is_start):
    """Run one sequence (l,d) token by token; return h, (l,d)."""
    weights = block.lstm
    state, outputs = None, []
    for t in range(len(inputs)):
        if state is None or is_start[t]:
            state = torch.zeros(2, D, dtype=inputs.dtype)
        h, c = read_lstm(block, state, noise[t])
        gates = weights.weight_ih_l0 @ inputs[t] + weights.bias_ih_l0
        i, f, g, o = (gates + weights.weight_hh_l0 @ h + weights.bias_hh_l0).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        state = torch.stack([o.sigmoid() * c.tanh(), c])
        outputs.append(state[0])
    return torch.stack(outputs)


@pytest.mark.parametrize("centroids, returns_state", [(0, False), (0, True), (3, False)])
def test_lstm_reads_the_noisy_h(centroids, returns_state):
    block = model_of("lstm", centroids).backbone.layers[0].block
    inputs, noise = torch.randn(2, LENGTH, D).double().requires_grad_(), sample_noise().double()
    starts = torch.zeros(2, LENGTH, dtype=torch.bool)
    starts[0, [0, 3]] = starts[1, [5, 6, 8]] = True
    output, _ = block.run(inputs, Sequences(starts=starts, noise=noise, return_state=returns_state))
    expected = torch.stack(
        [run_lstm_oracle(block, inputs[row], noise[row], starts[row]) for row in range(2)]
    )
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    parameters, weights = dict(block.named_parameters()), torch.randn(2, LENGTH, D)
    results = [
        torch.autograd.grad((outputs * weights).sum(), [inputs, *parameters.values()])
        for outputs in (output, expected)
    ]
    for name, gradient, expected_gradient in zip(["inputs", *parameters], *results, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, msg=name)


def slstm_step(block, gate_inputs, y, c, n, m):
    """Return y, c, n, m (d,) after a token, computed head by head."""
    parts = []
    for head in range(block.heads):
        e = slice(head * D // block.heads, (head + 1) * D // block.heads)
        i, f, z, o = gate_inputs[:, e] + torch.stack(
            [block.recurrent[gate, head] @ y[e] for gate in range(4)]
        )
        log_decay = F.logsigmoid(f) + m[e]
        new_m = torch.maximum(log_decay, i)
        new_c = (log_decay - new_m).exp() * c[e] + (i - new_m).exp() * z.tanh()
        new_n = (log_decay - new_m).exp() * n[e] + (i - new_m).exp()
        parts.append((o.sigmoid() * new_c / new_n, new_c, new_n, new_m))
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


@pytest.mark.parametrize("centroids", [0, 3])
def test_slstm_reads_the_noisy_y(centroids):
    block = model_of("slstm", centroids).backbone.layers[0].block
    block.group_norm, block.out_proj = torch.nn.Identity(), torch.nn.Identity()
    inputs, noise = torch.randn(2, LENGTH, D).double(), sample_noise().double()
    output, _ = block.run(inputs, Sequences(noise=noise))
    convolved = block.conv1d(inputs, None, None)
    for row in range(2):
        y, c, n = (torch.zeros(D).double() for _ in range(3))
        m = torch.full((D,), -1e30).double()
        for t in range(LENGTH):
            sources = (convolved, convolved, inputs, inputs)
            gate_inputs = torch.stack(
                [
                    (block.gates[gate] @ source[row, t].view(block.heads, -1, 1)).flatten()
                    + block.gate_bias[gate].flatten()
                    for gate, source in enumerate(sources)
                ]
            )
            read_y = y + noise[row, t]
            if centroids and t == 0:
                read_y = y
            elif centroids:
                scores = block.centroids.keys @ read_y + block.centroids.key_bias
                read_y = torch.softmax(scores, 0) @ block.centroids.vectors
            y, c, n, m = slstm_step(block, gate_inputs, read_y, c, n, m)
            torch.testing.assert_close(output[row, t], y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_draws_the_noise_in_training_only(kind):
    noisy, noiseless = model_of(kind, state_noise=SIGMA), model_of(kind)
    torch.manual_seed(2)
    first = noisy(tokens()).logits
    given = []
    with noiseless.override_solve_options(
        draw_noise=lambda *args: given.append(args) or sample_noise()
    ):
        torch.testing.assert_close(noiseless(tokens()).logits, first)
    assert len(given) == 1 and given[0][2] == 0  # σ of this model
    assert (noiseless(tokens()).logits - first).abs().max() > 1e-3
    assert torch.equal(noisy.eval()(tokens()).logits, noiseless.eval()(tokens()).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_a_sequence_does_not_depend_on_its_batch(kind):
    model = model_of(kind, state_noise=SIGMA)
    sets = [[torch.Generator().manual_seed(seed) for seed in seeds] for seeds in ((5, 6), (6,))]
    results = []
    for generators, ids in zip(sets, (tokens(), tokens()[1:]), strict=True):
        with model.override_solve_options(generators=generators):
            results.append(model(ids).logits[-1])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_the_same_under_gradient_checkpointing(kind):
    model, results = model_of(kind, state_noise=SIGMA), []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(2)
        model(tokens(), labels=tokens()).loss.backward()
        results.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, msg=name)


@pytest.mark.parametrize("kind, sigma", [("lstm", 0.0), ("slstm", SIGMA)])
def test_second_pass_follows_the_gradient_of_the_first(kind, sigma):
    model, size = model_of(kind, state_noise=sigma), 0.05
    adversary = Adversary(model, size)
    torch.manual_seed(2)
    with adversary.first_pass():
        model(tokens(), labels=tokens()).loss.backward()
    (noise,) = adversary.noise.values()
    first = noise.detach().clone()
    torch.testing.assert_close(first, sample_noise(sigma))

    def loss_with(noise):
        with model.override_solve_options(draw_noise=lambda *args: noise), torch.no_grad():
            return model(tokens(), labels=tokens()).loss.item()

    direction = torch.randn(first.shape, generator=torch.Generator().manual_seed(5)).double()
    above, below = (loss_with(first.double() + step * direction) for step in (1e-6, -1e-6))
    expected = pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-7)
    assert (noise.grad * direction).sum().item() == expected

    drawn = []
    with adversary.second_pass():
        draw = model.backbone.solve_options.draw_noise

        def record(*args):
            drawn.append(draw(*args))
            return drawn[-1]

        with model.override_solve_options(draw_noise=record):
            adversarial_loss = model(tokens(), labels=tokens()).loss.item()
    lengths = (drawn[0] - first).norm(dim=-1)
    assert lengths.max() <= size * D**0.5 and lengths.max() > 0
    assert adversarial_loss > loss_with(first.double())


@pytest.mark.parametrize("name", ["fprnn", *STACKS])
def test_named_models_get_the_noise_if_a_layer_has_it(name):
    section = Model(name=name, d_model=32, n_layer=1, n_heads=2 if name != "fprnn" else "auto")
    model = check_section(section, Solver(state_noise=SIGMA), seq_len=8)
    has_noise = any(layer.block.noise_width for layer in model.backbone.layers)
    assert section.has_state_noise == has_noise
    assert not has_noise or model.config.state_noise == SIGMA


def test_noise_without_a_layer_for_it_is_refused():
    fields = {"name": "x", "data": {"source": "builtin"}, "solver": {"state_noise": 0.1}}
    cfg = Config(**fields, model={"name": "mamba"})
    with pytest.raises(
        ConfigError, match=r"solver\.state_noise is 0\.1, but only fixed-point layers"
    ):
        check_state_noise(cfg)
    for model in ({"name": "lstm"}, {"layers": "slstm mamba", "n_layer": 2}, {}):
        check_state_noise(Config(**fields, model=model))
