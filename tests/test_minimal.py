"""examples/minimal.py against lm/model: the same function and the same gradients, in fp64."""

import importlib.util
from pathlib import Path

import pytest
import torch

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

PATH = Path(__file__).parents[1] / "examples" / "minimal.py"
# Names in the example → names in lm/model.
PREFIXES = {
    "embeddings.": "backbone.embeddings.",
    "norm.": "backbone.layers.0.norm.",
    "block.": "backbone.layers.0.block.",
    "norm_f.": "backbone.norm_f.",
}
PARTS = {
    "block.u_proj.": "block.mixer.u_proj.",
    "block.alpha_proj.": "block.mixer.alpha_proj.",
    "parametrizations.weight.original0": "gain",
    "parametrizations.weight.original1": "direction",
}


@pytest.fixture(scope="module")
def minimal():
    spec = importlib.util.spec_from_file_location("minimal", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rename(name):
    """Return the name in lm/model of a parameter of the example."""
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    name = PREFIXES[prefix] + name.removeprefix(prefix)
    for old, new in PARTS.items():
        name = name.replace(old, new)
    return name


def randomize(model, seed):
    """Draw every parameter, so that no term is multiplied by zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.3 * noise


@pytest.mark.parametrize("seed", range(4))
def test_example_equals_lm_model_in_values_and_gradients(minimal, seed):
    torch.manual_seed(seed)
    example = minimal.Model(vocab_size=6, d_model=16).double()
    randomize(example, seed)
    config = FPRNNConfig(vocab_size=6, d_model=16, n_layer=1)
    model = FPRNNForCausalLM(config).double()
    weights = {rename(name): value for name, value in example.state_dict().items()}
    weights["lm_head.weight"] = weights["backbone.embeddings.weight"]
    model.load_state_dict(weights)

    ids, products = minimal.draw_s3(4, 12)
    logits = example(ids)
    expected = model.train()(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)

    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), products.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in example.named_parameters():
        expected_gradient = gradients[rename(name)]
        assert expected_gradient.abs().max() > 0, name
        torch.testing.assert_close(
            parameter.grad, expected_gradient, rtol=1e-10, atol=1e-10, msg=name
        )


def test_training_grows_the_length_and_lowers_the_loss(minimal, capsys):
    model = minimal.train(steps=100)
    assert minimal.measure_accuracy(model, 3) > 0.9
    assert "step 100  length" in capsys.readouterr().out
