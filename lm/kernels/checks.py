"""Self-checks of the kernels: small problems, with loops in plain PyTorch as references.

Shape suffixes: b batch, l length, d channels, n states, r reflections.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lm.kernels import run_in_clean_threads
from lm.kernels.cell_arguments import CellArguments, Layout, Options

FAILED = 1  # as in lm/model/solver.py
MIN_CAPABILITY = (8, 0)  # of a GPU: bf16 products
PICARD_FAILS_SCALE = 30.0  # factor of an equation for which Picard's iteration does not converge


def find_fault(self_check: Callable[[], float], device: str, kernels: str) -> str:
    """Run a self-check in a clean thread.

    Args:
        self_check: Solves a small problem on torch's default device, and returns a `deviation`.
        device: The default device to set.
        kernels: Name of the kernels in the sentence.

    Returns:
        A sentence with the fault of the kernels, or "" if they are right.
    """

    def check():
        with torch.device(device):
            return self_check()

    try:
        (error,) = run_in_clean_threads(check)
    except Exception as wrong:  # Triton, its compiler and the driver raise many types
        return f"{kernels} fail: {type(wrong).__name__}: {str(wrong)[-500:]}"
    if not error < 1:
        return f"{kernels} compute something else than plain PyTorch: {error:.1e} × allowed"
    return ""


@functools.cache
def find_gpu_fault(self_check: Callable[[], float], kernels: str) -> str:
    """Check the GPU and run a self-check on it; see `find_fault`."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        version = ".".join(map(str, capability))
        return f"the GPU has compute capability {version}, {kernels} need 8.0"
    return find_fault(self_check, "cuda", kernels)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd needs a gradient of any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def deviation(ours: Sequence[Tensor], theirs: Sequence[Tensor], allowed: float) -> float:
    """Return the largest difference between two lists of tensors, in units of the allowed one.

    Args:
        ours: Tensors of the kernels.
        theirs: Tensors of the reference.
        allowed: Allowed difference, relative to the largest entry of each tensor.

    Returns:
        The deviation: above 1 if the difference is not allowed, NaN if a tensor contains NaN.
    """
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours, theirs)]
    errors = [(a - b).abs().max() / b.abs().max().clamp_min(1e-3) for a, b in pairs]
    return torch.stack(errors).max().item() / allowed


def gradient_deviation(
    ours: Callable[..., tuple[Tensor, ...]],
    theirs: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    loss: Callable[..., Tensor],
    allowed: float,
) -> float:
    """Return the `deviation` between two functions of the same tensors, gradients included.

    Args:
        ours: Kernel, a function of the tensors that returns several tensors.
        theirs: Reference with the same arguments and results.
        tensors: Arguments of both.
        loss: Function of the results; its gradients by the arguments are compared.
        allowed: See `deviation`.
    """

    def with_gradients(function):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        outputs = function(*leaves)
        return *outputs, *torch.autograd.grad(loss(*outputs), leaves)

    return deviation(with_gradients(ours), with_gradients(theirs), allowed)


def loop_over_time(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-1's selective scan token by token, with the arguments of `selective_scan`."""
    h = x.new_zeros(len(x), *A.shape) if h0 is None else h0
    ys = []
    for t in range(x.shape[1]):
        u = (dt[:, t] * x[:, t]).unsqueeze(-1)
        h = torch.exp(dt[:, t].unsqueeze(-1) * A) * h + u * B[:, t].unsqueeze(-2)
        ys.append((h * C[:, t].unsqueeze(-2)).sum(-1))
    return torch.stack(ys, 1), h


def scan_deviation(scan: Callable[..., Any], dtype: torch.dtype = torch.float32) -> float:
    """Return the `deviation` of a selective scan from `loop_over_time`, gradients included."""
    x, dt = torch.linspace(0, 1, 2 * 5 * 19, dtype=dtype).reshape(2, 1, 5, 19)
    A = -torch.linspace(0.1, 9, 19 * 3, dtype=dtype).reshape(19, 3)
    B, C = torch.linspace(-1, 1, 2 * 5 * 3, dtype=dtype).reshape(2, 1, 5, 3)

    def loss(y, h):
        return y.sum() + h.sum()

    return gradient_deviation(scan, loop_over_time, (x, dt, A, B, C, A[None]), loss, 1e-4)


def cell_deviation(
    cell: Callable[..., Any],
    dtype: torch.dtype,
    d: int = 19,
    n: int = 3,
    allowed: float = 1e-3,
) -> float:
    """Return the `deviation` of an exact solve from an iteration, gradients included.

    Args:
        cell: Function with the arguments of `lm.kernels.cpu.cpu_cell.cell`. It solves an FP-Mamba-1
            layer with one reflection.
        dtype: Dtype of the tensors.
        d: Channels.
        n: States.
        allowed: See `deviation`.
    """
    b, length = 2, 3
    layout = Layout(0, d, d + 1, d + 1 + n)
    options = Options(1, 1.0, "silu", True, 1e-6, None, True, 1, "layer", 1e-5)

    def wave(*shape):
        return torch.linspace(-3, 40, math.prod(shape), dtype=dtype).sin().reshape(shape)

    columns = d + 1 + 2 * n
    tensors = (
        wave(b, length, columns),
        wave(columns, d) / (2 * math.sqrt(d)),
        wave(b, length, d),
        wave(b, length, d).abs() / 4,
        -1 - wave(n, d).abs().t(),
        wave(b, length, d) / 2 + 1,
        wave(d) / 4,
        wave(d) + 1,
        wave(d) / 4,
    )

    def ours(raw, weight_y, x, dt, A, gate, D, norm_weight, norm_bias):
        tensors = raw, weight_y, x, dt, A, None, gate, D, norm_weight, norm_bias, None, None
        return cell(CellArguments(layout, options, *tensors))[:1]

    def loss(y):
        return y.square().sum()

    return gradient_deviation(ours, _iterate_tokens, tensors, loss, allowed)


def _iterate_tokens(raw, weight_y, x, dt, A, gate, D, weight, bias):
    """Solve the problem of `cell_deviation` by iterating each token's equation."""
    (b, length, d), n = x.shape, A.shape[1]
    y, h, ys = x.new_zeros(b, d), x.new_zeros(b, d, n), []
    normalize, layer_norm = torch.nn.functional.normalize, torch.nn.functional.layer_norm
    for t in range(length):
        vector, a, B, C = (raw[:, t] + y @ weight_y.t()).split([d, 1, n, n], -1)
        u = normalize(torch.nn.functional.silu(vector), dim=-1)
        B, C = normalize(B, dim=-1), normalize(C, dim=-1)
        h = torch.exp(dt[:, t].unsqueeze(-1) * A) * h
        past = (h * C.unsqueeze(1)).sum(-1)
        for _ in range(40):
            moved = torch.sigmoid(a) * (u * (y - x[:, t])).sum(-1, keepdim=True)
            mixed = x[:, t] + moved * u
            gamma = dt[:, t] * (B * C).sum(-1, keepdim=True) + D
            y = layer_norm(gate[:, t] * (past + gamma * mixed), (d,), weight, bias, 1e-5)
        moved = torch.sigmoid(a) * (u * (y - x[:, t])).sum(-1, keepdim=True)
        h = h + (dt[:, t] * (x[:, t] + moved * u)).unsqueeze(-1) * B.unsqueeze(1)
        ys.append(y)
    return (torch.stack(ys, 1),)


def roots_deviation(search: Callable[..., Any], dtype: torch.dtype) -> float:
    """Return the largest relative |φ(s) − s| of the solutions s, in units of the allowed one.

    Args:
        search: Function with the arguments of `lm.kernels.cpu.roots.find_roots`.
        dtype: Dtype of the equations.

    Returns:
        The deviation; infinity if the search fails for an equation.
    """
    errors = []
    for r in (1, 3, 5):
        steps = torch.arange(4 * r * r + 2, dtype=torch.float64)
        alpha, delta, gamma1 = (steps[k : k + 4 * r].sin().view(4, r) for k in range(3))
        beta = steps[: 4 * r * r].cos().view(4, r, r) / 4
        gamma2 = beta @ beta.mT + torch.eye(r, dtype=torch.float64)
        gamma0 = gamma1.square().sum(-1) + 1
        alpha[3] *= PICARD_FAILS_SCALE
        beta[3] *= PICARD_FAILS_SCALE
        s, outcome = search(
            *(t.to(dtype) for t in (alpha, beta, delta, gamma0, gamma1, gamma2)), 1e-5
        )
        s_column = s.double().unsqueeze(-1)
        slant = gamma1 + (gamma2 @ s_column).squeeze(-1)
        square = gamma0 + ((gamma1 + slant) * s).sum(-1)
        numerator = alpha + (beta @ s_column).squeeze(-1)
        phi = numerator * square.rsqrt().unsqueeze(-1) + delta
        error = (phi - s).abs() / (1 + phi.abs())
        errors.append(torch.where((outcome != FAILED).unsqueeze(-1), error, torch.inf).max())
    return torch.stack(errors).max().item() / 1e-4
