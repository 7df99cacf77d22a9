"""Self-checks of the kernels: small problems that loops in plain PyTorch solve as well.

Shape suffixes: b batch, l length, d channels, n states, r reflections.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lm.kernels import run_in_clean_threads
from lm.kernels.cell_arguments import FAILED, CellArguments, Layout, Options

MIN_CAPABILITY = (8, 0)  # of a GPU: bf16 products
# Factor on α and Β of an equation for which Picard's iteration should not converge.
PICARD_FAILS_SCALE = 30.0


# Phrases in the messages of `find_fault`; tests search for them.
DIFFER, FAIL = "differ from plain PyTorch", "fail:"


def find_fault(self_check: Callable[[], float], device: str, kernels: str) -> str:
    """Run a self-check in a clean thread.

    Args:
        self_check: Function that solves a small problem on torch's default device and returns a
            `deviation`.
        device: The default device to set.
        kernels: Name of the kernels, the subject of the sentence.

    Returns:
        A sentence that describes the fault of the kernels, or "" if they are right.
    """

    def check():
        with torch.device(device):
            return self_check()

    try:
        (relative_error,) = run_in_clean_threads(check)
    except Exception as error:  # Triton, its compiler and the driver raise many types
        return f"{kernels} {FAIL} {type(error).__name__}: {str(error)[-500:]}"
    if not relative_error < 1:  # NaN is a fault as well
        return f"{kernels} {DIFFER} by {relative_error:.1e} times the allowed difference"
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
    """Return whether autograd needs the gradient of any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def deviation(ours: Sequence[Tensor], theirs: Sequence[Tensor], allowed: float) -> float:
    """Return the largest difference between two lists of tensors, divided by the allowed one.

    Args:
        ours: Tensors of the kernels.
        theirs: Tensors of the reference.
        allowed: Allowed difference, relative to each tensor's largest entry in `theirs` (to 1e-3 if
            that entry is smaller).

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
        loss: Scalar function of the results. Its gradients by the tensors are compared.
        allowed: See `deviation`.
    """

    def with_gradients(function):
        inputs = [t.detach().clone().requires_grad_() for t in tensors]
        outputs = function(*inputs)
        return *outputs, *torch.autograd.grad(loss(*outputs), inputs)

    return deviation(with_gradients(ours), with_gradients(theirs), allowed)


def loop_over_time(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-1's scan token by token; arguments and results as for `selective_scan`."""
    h = x.new_zeros(len(x), *A.shape) if h0 is None else h0
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t].unsqueeze(-1) * A)
        h = decay * h + (dt[:, t] * x[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(-2)
        outputs.append((h * C[:, t].unsqueeze(-2)).sum(-1))
    return torch.stack(outputs, 1), h


def scan_deviation(scan: Callable[..., Any], dtype: torch.dtype = torch.float32) -> float:
    """Return the `deviation` of a selective scan from `loop_over_time`, gradients included."""
    b, length, d, n = 1, 5, 19, 3
    x, dt = torch.linspace(0, 1, 2 * length * d, dtype=dtype).reshape(2, b, length, d)
    A = -torch.linspace(0.1, 9, d * n, dtype=dtype).reshape(d, n)
    B, C = torch.linspace(-1, 1, 2 * length * n, dtype=dtype).reshape(2, b, length, n)
    h0 = A[None]

    def loss(y, h):
        return y.sum() + h.sum()

    return gradient_deviation(scan, loop_over_time, (x, dt, A, B, C, h0), loss, 1e-4)


def cell_deviation(
    cell: Callable[..., Any],
    dtype: torch.dtype,
    b: int = 2,
    length: int = 3,
    d: int = 19,
    n: int = 3,
    r: int = 1,
    norm_scale: float = 1.0,
    allowed: float = 1e-3,
) -> float:
    """Return the `deviation` of an exact solve from an iteration, gradients included.

    Args:
        cell: Function with the arguments of `lm.kernels.cpu.cpu_cell.cell`. It solves an FP-Mamba-1
            layer with reflections in sequence.
        dtype: Dtype of the tensors.
        b: Sequences.
        length: Tokens per sequence.
        d: Channels.
        n: States.
        r: Reflections.
        norm_scale: Factor on the norm's weight. Large problems need a small factor, so that the
            iteration converges and rounding errors do not grow from token to token.
        allowed: See `deviation`.
    """
    B = r * d + r  # the first column of B
    layout = Layout(vectors=0, gates=r * d, B=B, C=B + n)
    mixer: dict[str, Any] = dict(rank=r, scale=1.0, act="silu", sequential=True, eps=1e-6)
    norms: dict[str, Any] = dict(bc_norm=True, norm="layer", norm_eps=1e-5)
    options = Options(**mixer, **norms, contractive=None, groups=1, states=n)

    def wave(*shape):
        return torch.linspace(-3, 40, math.prod(shape), dtype=dtype).sin().reshape(shape)

    columns = B + 2 * n
    tensors = {
        "raw": wave(b, length, columns),
        "weight_y": wave(columns, d) / (2 * math.sqrt(d)),
        "x": wave(b, length, d),
        "dt": wave(b, length, d).abs() / 4,
        "A": -1 - wave(n, d).abs().t(),
        "gate": wave(b, length, d) / 2 + 1,
        "D": wave(d) / 4,
        "norm_weight": norm_scale * (wave(d) + 1),
        "norm_bias": wave(d) / 4,
    }

    def ours(*values):
        fields = dict(zip(tensors, values), keep=None, y0=None, h0=None)
        return cell(CellArguments(layout, options, **fields))[:1]  # y only

    def loss(y):
        return y.square().sum()

    return gradient_deviation(ours, _iterate_tokens, [*tensors.values()], loss, allowed)


def _reflect(u, a, v):
    """Apply the reflections I − a_i u_i u_iᵀ one after the other; u (b,r,d), a (b,r), v (b,d)."""
    for u_i, a_i in zip(u.unbind(1), a.unbind(1)):
        v = v - (a_i * (u_i * v).sum(-1)).unsqueeze(-1) * u_i
    return v


def _iterate_tokens(raw, weight_y, x, dt, A, gate, D, weight, bias):
    """Solve the problem of `cell_deviation` by iterating each token's equation."""
    (b, length, d), n = x.shape, A.shape[1]
    r = (raw.shape[-1] - 2 * n) // (d + 1)
    y, h, outputs = x.new_zeros(b, d), x.new_zeros(b, d, n), []
    normalize, layer_norm = torch.nn.functional.normalize, torch.nn.functional.layer_norm
    for t in range(length):
        vectors, gates, B, C = (raw[:, t] + y @ weight_y.t()).split([r * d, r, n, n], -1)
        u = normalize(torch.nn.functional.silu(vectors.view(b, r, d)), dim=-1)
        B, C = normalize(B, dim=-1), normalize(C, dim=-1)
        h = torch.exp(dt[:, t].unsqueeze(-1) * A) * h
        history = (h * C.unsqueeze(1)).sum(-1)
        gamma = dt[:, t] * (B * C).sum(-1, keepdim=True) + D
        for _ in range(40):  # enough to converge
            mixed = _reflect(u, torch.sigmoid(gates), x[:, t] - y) + y
            y = layer_norm(gate[:, t] * (history + gamma * mixed), (d,), weight, bias, 1e-5)
        mixed = _reflect(u, torch.sigmoid(gates), x[:, t] - y) + y
        h = h + (dt[:, t] * mixed).unsqueeze(-1) * B.unsqueeze(1)
        outputs.append(y)
    return (torch.stack(outputs, 1),)


def roots_deviation(search: Callable[..., Any], dtype: torch.dtype) -> float:
    """Return the largest relative |φ(s) − s| of the solutions s, divided by the allowed one.

    Args:
        search: Function with the arguments of `lm.kernels.cpu.roots.find_roots`.
        dtype: Dtype of the equations.

    Returns:
        The deviation; infinity if the search fails for an equation.
    """
    errors = []
    for r in (1, 3, 5):
        # 1. Make four equations with r unknowns; for the last one, Picard's iteration fails.
        angles = torch.arange(4 * r * r + 2, dtype=torch.float64)
        alpha, delta, gamma1 = (angles[k : k + 4 * r].sin().view(4, r) for k in range(3))
        beta = angles[: 4 * r * r].cos().view(4, r, r) / 4
        gamma2 = beta @ beta.mT + torch.eye(r, dtype=torch.float64)
        gamma0 = gamma1.square().sum(-1) + 1
        alpha[3] *= PICARD_FAILS_SCALE
        beta[3] *= PICARD_FAILS_SCALE
        # 2. Solve them, and evaluate φ(s) in fp64.
        s, outcome = search(
            *(t.to(dtype) for t in (alpha, beta, delta, gamma0, gamma1, gamma2)), 1e-5
        )
        s_column = s.double().unsqueeze(-1)
        slant = gamma1 + (gamma2 @ s_column).squeeze(-1)
        radicand = gamma0 + ((gamma1 + slant) * s).sum(-1)
        numerator = alpha + (beta @ s_column).squeeze(-1)
        phi = numerator * radicand.rsqrt().unsqueeze(-1) + delta
        error = (phi - s).abs() / (1 + phi.abs())
        errors.append(torch.where((outcome != FAILED).unsqueeze(-1), error, torch.inf).max())
    return torch.stack(errors).max().item() / 1e-4
