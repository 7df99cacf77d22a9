"""Tests of the small layers: weight normalisation, and matrices of replaced or hooked layers."""

import copy

import pytest
import torch
from torch import nn

from lm.model.layers import ShortConv, StepSize, WNLinear, affine_map, padded_linear
from lm.model.scan import causal_conv


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = WNLinear(5, 3, bias=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def test_weight_is_the_matrix_that_the_layer_applies(layer):
    x = torch.randn(2, 5)
    unit = layer.direction / layer.direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(layer.weight, layer.gain * unit)
    torch.testing.assert_close(layer(x), x @ (layer.gain * unit).T + layer.bias)
    assert isinstance(layer, nn.Linear)
    assert [name for name, _ in layer.named_parameters()] == ["direction", "gain", "bias"]


def test_gain_and_direction_get_the_gradient_of_weight(layer):
    (layer.weight**2).sum().backward()
    torch.testing.assert_close(layer.gain.grad, 2 * layer.gain.detach())
    # ‖W‖ does not depend on the direction.
    torch.testing.assert_close(layer.direction.grad, torch.zeros(3, 5))


def test_the_gradient_of_the_matrix_equals_autograd_of_its_formula(layer):
    layer.double()
    factor = torch.randn(3, 5, dtype=torch.float64)
    (layer.matrix() * factor).sum().backward()
    computed = {name: p.grad for name, p in layer.named_parameters() if name != "bias"}
    direction, gain = (p.detach().requires_grad_() for p in (layer.direction, layer.gain))
    formula = gain * (direction / torch.linalg.vector_norm(direction, dim=1, keepdim=True))
    torch.testing.assert_close(layer.matrix(), formula)
    (formula * factor).sum().backward()
    torch.testing.assert_close(computed, {"direction": direction.grad, "gain": gain.grad})


def test_a_narrow_matrix_is_the_rounded_matrix_and_has_a_wide_gradient(layer):
    factor = torch.randn(3, 5).bfloat16()
    gradients = []
    for matrix in (layer.matrix(torch.bfloat16), layer.matrix().bfloat16()):
        layer.zero_grad()
        torch.testing.assert_close(matrix, layer.matrix().bfloat16(), rtol=0, atol=0)
        (matrix * factor).sum().backward()
        gradients.append({"direction": layer.direction.grad, "gain": layer.gain.grad})
    torch.testing.assert_close(*gradients)
    assert {g.dtype for g in gradients[0].values()} == {torch.float32}
    for dtype in (torch.float64, torch.bfloat16):  # autocast casts only fp32
        assert layer.to(dtype).matrix(torch.float16).dtype == dtype


def test_a_row_of_zeros_has_a_finite_gradient(layer):
    W = torch.randn(3, 5)
    W[1] = 0
    layer.weight = W
    layer.matrix().sum().backward()
    assert layer.direction.grad.isfinite().all() and layer.gain.grad.isfinite().all()


def test_weight_can_be_assigned(layer):
    W = torch.randn(3, 5)
    layer.weight = W
    torch.testing.assert_close(layer.weight.data, W)
    layer.weight.data += 1
    torch.testing.assert_close(layer.weight.data, W + 1)
    layer.weight += 1
    torch.testing.assert_close(layer.weight.data, W + 2)
    layer.weight = nn.Parameter(3 * W)
    torch.testing.assert_close(layer.weight.data, 3 * W)
    layer.weight.data = -W
    torch.testing.assert_close(layer(torch.eye(5)).T - layer.bias[:, None], -W)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.zero_(),
        lambda weight: nn.init.normal_(weight),
        lambda weight: weight.__setitem__(0, 1),
        lambda weight: weight.data.copy_(torch.ones(3, 5)),
        lambda weight: weight.data.__setitem__(0, 1),
    ],
    ids=["method", "init", "item", "data method", "data item"],
)
def test_a_change_in_place_that_would_be_lost_is_an_error(layer, change):
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(TypeError, match="computed from its direction and gain"):
        change(layer.weight)
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())


def test_a_row_of_zeros_is_zero(layer):
    W = torch.randn(3, 5)
    W[1] = 0
    layer.weight = W
    torch.testing.assert_close(layer.weight.data, W)


class Doubled(nn.Linear):
    """A layer whose output does not follow from its weight and bias, as with an adapter."""

    def forward(self, x):
        return 2 * super().forward(x) + 1


def test_affine_map_equals_the_layer(layer):
    x = torch.randn(4, 5)
    plain, other = nn.Linear(5, 3), Doubled(5, 3)
    hooked = nn.Linear(5, 3)
    hooked.register_forward_hook(lambda module, args, out: 3 * out)
    patched = nn.Linear(5, 3)
    patched.forward = lambda x: x[..., :3] - 1
    for module in (layer, plain, other, hooked, patched):
        matrix, bias = affine_map(module, x)
        torch.testing.assert_close(nn.functional.linear(x, matrix, bias), module(x))
    assert affine_map(plain, x)[0] is plain.weight
    assert affine_map(nn.Linear(5, 3, bias=False), x)[1] is None


def test_affine_map_of_a_hooked_layer_is_accurate_despite_a_large_bias():
    torch.manual_seed(0)
    layer, x = WNLinear(256, 4, bias=True), torch.randn(64, 256)
    nn.init.normal_(layer.direction)
    nn.init.constant_(layer.gain, 0.5)
    nn.init.constant_(layer.bias, 4.0)
    exact = x @ layer.matrix().T
    layer = layer.bfloat16()
    plain, _ = affine_map(layer, x.bfloat16())
    layer.register_forward_hook(lambda module, args, out: None)
    measured, bias = affine_map(layer, x.bfloat16())
    error, plain_error = ((x @ m.float().T - exact).norm() for m in (measured, plain))
    assert error < 3 * plain_error and torch.equal(bias, layer.bias)


def test_affine_map_of_a_replaced_layer_has_its_gradient():
    other, x = Doubled(5, 3), torch.randn(4, 5)
    nn.functional.linear(x, *affine_map(other, x)).sum().backward()
    through_matrix = other.weight.grad.clone()
    other.zero_grad()
    other(x).sum().backward()
    torch.testing.assert_close(through_matrix, other.weight.grad)


def test_step_size_adds_its_bias_in_full_precision():
    layer = StepSize(4, 3).bfloat16()
    layer.bias.data = torch.tensor([1e-3, 1.0, -5.0])
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    out = layer(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out - layer.bias, (x @ layer.weight.T).float())


def test_short_conv_is_silu_of_the_causal_convolution():
    torch.manual_seed(0)
    conv, x = ShortConv(6, 4), torch.randn(2, 9, 6)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]]).expand(2, 9)
    expected = nn.functional.silu(causal_conv(x, conv.weight, conv.bias, segments))
    torch.testing.assert_close(conv(x, segments), expected)


@pytest.mark.parametrize("rows, padded_rows", [(8, 8), (13, 16), (1, 8)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_a_gpu_a_matrix_has_a_multiple_of_eight_rows(rows, padded_rows, with_bias, monkeypatch):
    """The patched `is_on_cpu` treats the CPU's tensors as tensors on a GPU."""
    torch.manual_seed(0)
    x, matrix, bias = torch.randn(2, 3, 5), torch.randn(rows, 5), torch.randn(rows)
    bias = bias if with_bias else None
    linear, row_counts = nn.functional.linear, []
    expected = linear(x, matrix, bias)

    def record_rows(x, matrix, bias):
        row_counts.append(len(matrix))
        return linear(x, matrix, bias)

    monkeypatch.setattr("lm.model.layers.is_on_cpu", lambda t: False)
    monkeypatch.setattr(nn.functional, "linear", record_rows)
    product = padded_linear(x, matrix, bias)
    torch.testing.assert_close(product[..., :rows], expected)
    assert not product[..., rows:].any()
    assert row_counts == [padded_rows]
