"""Diagonal recurrences in plain PyTorch, and access to the faster kernels of lm/kernels.

The recurrences are the scans of Mamba-1 and Mamba-2, and a scan with a vector state (FP-RNN).

Shape suffixes: b batch, l length, d channels, n states; i chunks, c steps within a chunk; h heads,
p head dimension, g groups.

    h_t = exp(dt_t A) ⊙ h_{t−1} + (dt_t ⊙ x_t) B_tᵀ        y_t = h_t C_t          (paper Eq. 12)

The plain scan cuts time into i ≈ √l chunks of c ≈ √l steps, and one Python loop of c steps advances
all chunks at once. A first pass from a zero state computes the contribution of each chunk. A loop
over the chunks then computes the states at their boundaries. A second pass from these states gives
h.
"""

import importlib
import importlib.machinery
import importlib.util
import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from .bundled_kernels import load_bundled_kernels

logger = logging.get_logger(__name__)

INTERFACE = ("fprnn-kernels", 6)  # the version of lm.kernels that this file needs

# Bytes of temporaries of the selective scan, which limit the channels that are computed at once.
MAX_TEMPORARY_BYTES = 512 * 2**20


@cache
def _kernels():
    """Return lm.kernels, or the kernels that an export contains, or None with one warning.

    The bundled kernels are used if the package fprnn is missing or of another version, or if the
    installed `lm` is an unrelated package.
    """
    kernels, reason = _find_kernels()
    if kernels is None:
        try:
            kernels = load_bundled_kernels()
        except (OSError, RuntimeError) as error:
            reason += f", and the kernels in the model's folder cannot be written: {error}"
    if kernels is None:
        logger.warning_once(
            f"fprnn's kernels are not used, and the model runs in plain PyTorch: {reason}"
        )
    return kernels


def _find_kernels():
    """Return lm.kernels and "", or None and the reason."""
    try:
        package = importlib.util.find_spec("lm")
    except ValueError:  # some code has put a module without a spec into sys.modules
        return None, "the module called `lm` here is not fprnn's"
    if package is None:
        return None, "the package fprnn is not installed"
    # Find the submodule without running the code of an unrelated package.
    folders = list(package.submodule_search_locations or ())
    if importlib.machinery.PathFinder.find_spec("lm.kernels", folders) is None:
        return None, f"the package `lm` at {package.origin or folders} is not fprnn's"
    try:
        kernels = importlib.import_module("lm.kernels")
    except Exception as error:  # unrelated code or a broken installation may raise anything
        return None, f"`lm.kernels` cannot be imported: {type(error).__name__}: {error}"
    version = getattr(kernels, "INTERFACE", None)
    if version == INTERFACE:
        return kernels, ""
    return None, f"`lm.kernels` at {kernels.__file__} offers {version}, not {INTERFACE}"


def find_backend(operation: str, like: torch.Tensor) -> Any:
    """Return the module of lm.kernels for an operation, or None for the plain version.

    Args:
        operation: One of lm.kernels.OPERATIONS.
        like: A tensor with the device and dtype of the computation.
    """
    kernels = _kernels()
    return None if kernels is None else kernels.find(operation, like)


def try_kernel(operation: str, function: str, like: torch.Tensor, *args: Any) -> Any:
    """Compute an operation with a kernel; return None if no kernel supports the arguments.

    Args:
        operation: One of lm.kernels.OPERATIONS.
        function: Name of the function in the module of `find_backend`.
        like: A tensor with the device and dtype of the computation.
        *args: Arguments of the function.
    """
    kernels = _kernels()
    return None if kernels is None else kernels.compute(operation, function, like, *args)


def _chunk_size(length):
    """Return the steps per chunk: the smallest power of two that is at least √length."""
    return 1 << math.ceil(math.log2(max(1.0, length**0.5)))


def _chunked(x, c):
    """Return x (b,l,…) as (b,i,c,…), padded with zeros: steps with dt = 0 keep the state."""
    pad = -x.shape[1] % c
    if pad:
        x = torch.cat([x, x.new_zeros(x.shape[0], pad, *x.shape[2:])], 1)
    return x.unflatten(1, (-1, c))


def _carry(h0, decay, contribution):
    """Return the state before each chunk, (b,i,d), from the contribution of each chunk, (b,i,d)."""
    entering, h = torch.empty_like(contribution), h0
    for i in range(decay.shape[1]):
        entering[:, i] = h
        h = torch.addcmul(contribution[:, i], decay[:, i], h)
    return entering


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    h0: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Mamba-1's selective scan, with a kernel if there is one; differentiable once.

    Args:
        x: Input after the mixer, (b,l,d).
        dt: Step sizes, (b,l,d).
        A: Negative rates, (d,n).
        B: Input maps, (b,l,n).
        C: Output maps, (b,l,n).
        h0: Initial state, (b,d,n); None is zero.
        keep: 0 at tokens that start from an empty state, otherwise 1, (b,l); not differentiated.

    Returns:
        y (b,l,d) and the final state (b,d,n), in fp32, or in fp64 if an input is fp64.

    Source: Gu & Dao 2023; paper Eq. 12.
    """
    inputs = _same_dtype(x, dt, A, B, C, h0, keep)
    result = try_kernel("selective_scan", "selective_scan", inputs[0], *inputs)
    return selective_scan_plain(*inputs) if result is None else result  # type: ignore[arg-type]


def _same_dtype(*tensors):
    """Return the tensors in the widest of their dtypes, at least fp32."""
    dtype = torch.float32
    for t in tensors:
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    return [None if t is None else t.to(dtype) for t in tensors]


def selective_scan_plain(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    h0: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `selective_scan` in plain PyTorch; the oracle of the kernels.

    Nothing of size (b,l,d,n) is stored: the backward computes slices of channels again.
    """
    x, dt, A, B, C, h0, keep = _same_dtype(x, dt, A, B, C, h0, keep)
    h0 = x.new_zeros(len(x), *A.shape) if h0 is None else h0
    # Per channel four tensors of B's shape: states, decays, inputs, products.
    channel_bytes = 4 * B.numel() * B.element_size()
    width = max(1, MAX_TEMPORARY_BYTES // channel_bytes)  # channels at once
    with torch.autocast(x.device.type, enabled=False):
        slices = zip(x.split(width, 2), dt.split(width, 2), A.split(width), h0.split(width, 1))
        results = [
            checkpoint(
                _scan_channels, *tensors, B, C, keep, use_reentrant=False, preserve_rng_state=False
            )
            for tensors in slices
        ]
        y, h = zip(*results)
        return torch.cat(y, 2), torch.cat(h, 1)


def _scan_channels(x, dt, A, h0, B, C, keep):
    """Return y and the final state of some channels, by one `linear_scan` over their states."""
    decays = torch.exp(dt.unsqueeze(-1) * A)  # (b,l,d,n)
    if keep is not None:
        decays = decays * keep[..., None, None]
    inputs = (x * dt).unsqueeze(-1) * B.unsqueeze(2)  # (b,l,d,n)
    h = linear_scan(decays.flatten(2), inputs.flatten(2), h0.flatten(1)).view_as(inputs)
    # Not a matrix product: a backward under autocast would round it.
    return (h * C.unsqueeze(2)).sum(-1), h[:, -1].clone()


class _LinearScan(torch.autograd.Function):
    """Recurrence h_t = a_t h_{t−1} + u_t; the backward runs the same recurrence in reverse."""

    @staticmethod
    def forward(ctx, a, u, h0):
        h = _linear_recurrence(a, u, h0)
        ctx.save_for_backward(a, h, h0)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_h):
        a, h, h0 = ctx.saved_tensors
        a_next = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
        zero = torch.zeros_like(grad_h[:, 0])
        g = _linear_recurrence(a_next.flip(1), grad_h.flip(1), zero).flip(1)
        h_previous = torch.cat([h0.unsqueeze(1), h[:, :-1]], 1)
        return g * h_previous, g, a[:, 0] * g[:, 0]


def _linear_recurrence(a, u, h0):
    """Return h (b,l,d) with h_t = a_t h_{t−1} + u_t, all chunks at once."""
    length, c = u.shape[1], _chunk_size(u.shape[1])
    a_c, u_c = _chunked(a, c), _chunked(u, c)
    padding = u_c.shape[1] * c - length
    if padding:  # padded steps keep the state
        a_c[:, -1, -padding:] = 1
    # 1. Compute each chunk's contribution from a zero state, (b,i,d).
    h = torch.zeros_like(u_c[:, :, 0])
    for j in range(c):
        h = torch.addcmul(u_c[:, :, j], a_c[:, :, j], h)
    # 2. Compute the states before the chunks, (b,i,d).
    h = _carry(h0, a_c.prod(2), h)
    # 3. Run each chunk from its state.
    out = torch.empty_like(u_c)
    for j in range(c):
        h = torch.addcmul(u_c[:, :, j], a_c[:, :, j], h)
        out[:, :, j] = h
    return out.flatten(1, 2)[:, :length]


def linear_scan(a: torch.Tensor, u: torch.Tensor, h0: torch.Tensor | None = None) -> torch.Tensor:
    """Compute h_t = a_t ⊙ h_{t−1} + u_t, the vector state of FP-RNN; differentiable once.

    Args:
        a: Decays, (b,l,d).
        u: Inputs, (b,l,d).
        h0: Initial state, (b,d); None is zero.

    Returns:
        h (b,l,d), in fp32, or in fp64 if an input is fp64.
    """
    dtype = torch.promote_types(torch.promote_types(a.dtype, u.dtype), torch.float32)
    h0 = torch.zeros_like(u[:, 0]) if h0 is None else h0
    with torch.autocast(u.device.type, enabled=False):
        return _LinearScan.apply(a.to(dtype), u.to(dtype), h0.to(dtype))


SSD_CHUNK = 64  # steps per chunk of Mamba-2's scan


def ssd_decays(
    dt: torch.Tensor, A: torch.Tensor, keep: torch.Tensor | None = None, chunk: int = SSD_CHUNK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the decays of `ssd_scan` between steps of a chunk.

    Args:
        dt: Step sizes, (b,l,h).
        A: Negative rates, (h,).
        keep: 0 at tokens that start from an empty state, otherwise 1, (b,l), or None.
        chunk: Steps per chunk c, at most l.

    Returns:
        between: Decay from step j to step k ≥ j of a chunk, (b,i,h,c,c).
        to_end: Decay from a step to the end of its chunk, (b,i,c,h).
        from_start: Decay from the start of the chunk to a step, inclusive, (b,i,c,h).
    """
    chunk = min(chunk, max(1, dt.shape[1]))
    log_decay = _chunked(dt * A, chunk).cumsum(2)  # from the start of the chunk, (b,i,c,h)
    between = (log_decay.unsqueeze(3) - log_decay.unsqueeze(2)).permute(0, 1, 4, 2, 3)
    is_connected = torch.ones(chunk, chunk, dtype=torch.bool, device=dt.device).tril()
    is_kept_from_start = is_kept_to_end = log_decay.new_ones(())
    if keep is not None:  # two steps are connected if no reset lies between them
        resets = _chunked((keep == 0).long(), chunk).cumsum(2)  # number of resets so far, (b,i,c)
        is_connected = is_connected & (resets.unsqueeze(3) == resets.unsqueeze(2)).unsqueeze(2)
        is_kept_from_start = (resets == 0).unsqueeze(-1)
        is_kept_to_end = (resets == resets[:, :, -1:]).unsqueeze(-1)
    # Mask before the exponential: it would overflow above the diagonal.
    between = torch.exp(between.masked_fill(~is_connected, -torch.inf))
    to_end = torch.exp(log_decay[:, :, -1:] - log_decay) * is_kept_to_end
    return between, to_end, torch.exp(log_decay) * is_kept_from_start


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    h0: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Mamba-2's scan, with a kernel if there is one.

        S_t = exp(dt_t A) S_{t−1} + dt_t x_t B_tᵀ  (p×n per head),   y_t = S_t C_t

    Args:
        x: Input, (b,l,h,p).
        dt: Step sizes, (b,l,h).
        A: Negative rates, (h,).
        B: Input maps, (b,l,g,n), where g divides h.
        C: Output maps, (b,l,g,n).
        h0: Initial state, (b,h,p,n); None is zero.
        keep: 0 at tokens that start from an empty state, otherwise 1, (b,l).

    Returns:
        y (b,l,h,p) and the final state (b,h,p,n), in fp32, or in fp64 if an input is fp64.
    """
    inputs = *_same_dtype(x, dt, A, B, C, h0), keep
    result = try_kernel("ssd_scan", "ssd_scan", inputs[0], *inputs)
    return ssd_scan_plain(*inputs) if result is None else result


def ssd_scan_plain(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    h0: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    chunk: int = SSD_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ssd_scan` in its chunked matrix form; the oracle of the kernels.

    Within a chunk y is a masked matrix product. Only the states pass from chunk to chunk.

    Source: state-space duality, Dao & Gu 2024.
    """
    x, dt, A, B, C, h0 = _same_dtype(x, dt, A, B, C, h0)
    with torch.autocast(x.device.type, enabled=False):
        length, heads, groups = x.shape[1], x.shape[2], B.shape[2]
        between, to_end, from_start = ssd_decays(dt, A, keep, chunk)
        chunk = between.shape[-1]
        per_group = heads // groups
        u = _chunked(x * dt.unsqueeze(-1), chunk)  # (b,i,c,h,p)
        B_c, C_c = _chunked(B, chunk), _chunked(C, chunk)  # (b,i,c,g,n)

        # 1. Add what each step reads from the steps of its own chunk.
        scores = torch.einsum("bikgn,bijgn->bigkj", C_c, B_c)
        scores = scores.repeat_interleave(per_group, 2) * between  # (b,i,h,c,c)
        y = torch.einsum("bihkj,bijhp->bikhp", scores, u)

        # 2. Compute the states before the chunks, (b,i,h,p,n).
        B_h = B_c.repeat_interleave(per_group, 3)
        contribution = torch.einsum("bichp,bichn->bihpn", u * to_end.unsqueeze(-1), B_h)
        chunk_decay = from_start[:, :, -1, :, None, None]  # (b,i,h,1,1)
        state = contribution.new_zeros(contribution[:, 0].shape) if h0 is None else h0
        entering = []
        for i in range(contribution.shape[1]):
            entering.append(state)
            state = chunk_decay[:, i] * state + contribution[:, i]
        entering = torch.stack(entering, 1)

        # 3. Add what each step reads from the state before its chunk.
        C_h = C_c.repeat_interleave(per_group, 3) * from_start.unsqueeze(-1)
        y = y + torch.einsum("bichn,bihpn->bichp", C_h, entering)
        return y.flatten(1, 2)[:, :length], state


def _convolve_few(x, weight, bias):
    """Compute `causal_conv` of a few tokens: each window times the taps."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight[:, 0].to(dtype)
    windows = F.pad(x.to(dtype), (0, 0, taps.shape[1] - 1, 0)).unfold(1, taps.shape[1], 1)
    y = (windows * taps).sum(-1)
    return (y if bias is None else y + bias).to(x.dtype)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a depthwise causal convolution over time within documents.

    Args:
        x: Input, (b,l,d).
        weight: Taps, (d,1,k).
        bias: Bias, (d,), or None.
        segments: Document index of each token, (b,l), or None for one document.
        before: The k−1 inputs before x, which belong to document 0, (b,k−1,d); None is zero.

    Returns:
        The convolution, (b,l,d).
    """
    k = weight.shape[-1]
    if before is not None:
        segments = None if segments is None else F.pad(segments, (k - 1, 0))
        x = torch.cat([before.to(x.dtype), x], 1)
        return causal_conv(x, weight, bias, segments)[:, k - 1 :]
    if segments is None and x.shape[1] < 2 * k:  # conv1d has a fixed cost
        return _convolve_few(x, weight, bias)
    if segments is None:
        y = F.conv1d(x.transpose(1, 2), weight, bias, padding=k - 1, groups=x.shape[-1])
        return y[..., : x.shape[1]].transpose(1, 2)
    taps = weight[:, 0].to(x.dtype)
    y = x * taps[:, -1]
    for lag in range(1, min(k, x.shape[1])):
        is_same_document = (segments[:, lag:] == segments[:, :-lag]).unsqueeze(-1)
        y = y + F.pad(x[:, :-lag] * is_same_document * taps[:, -1 - lag], (0, 0, lag, 0))
    return y if bias is None else y + bias
