"""The diagonal recurrences in plain PyTorch, and the choice of a faster backend (lm/kernels).

Mamba-1's selective scan, Mamba-2's, and that of a vector state.
Shape suffixes: b batch, l length, d channels, n states; i chunks, c steps within a chunk; h heads,
p head dimension, g groups.

    h_t = exp(dt_t A) ⊙ h_{t−1} + (dt_t ⊙ x_t) B_tᵀ        y_t = h_t C_t          (paper Eq. 12)

Time is cut into i ≈ √L chunks of c ≈ √L steps, and one Python loop of c steps advances all chunks
at once. A first pass from a zero state gives what each chunk adds; the states at the chunk
boundaries follow by a loop over chunks; a second pass from the right states gives h.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import math
import os
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from .bundled_kernels import load_bundled_kernels

logger = logging.get_logger(__name__)

INTERFACE = ("fprnn-kernels", 4)  # of lm.kernels, as this file uses it

# Largest temporary (in bytes) of the selective scan: it takes so many channels at once.
MAX_TEMPORARY = 512 * 2**20


@cache
def _kernels():
    """lm.kernels; where it is not there or not what this file knows, the kernels that an export
    brings along: it runs without the package, beside another version of it, or beside a stranger
    that is called `lm` as well. None without either, which is said once."""
    kernels, why = _find_kernels()
    if kernels is None:
        try:
            kernels = load_bundled_kernels()
        except (OSError, RuntimeError) as wrong:
            why += f", and those that came with the model cannot be written: {wrong}"
    if kernels is None:
        logger.warning_once(
            f"fprnn's kernels are not used, and the model is computed in plain PyTorch: {why}"
        )
    return kernels


@contextlib.contextmanager
def _unregistered():
    """Within, `import lm` does not register its model classes, where this file is not its own:
    transformers would prefer them to the code of the export that is being run."""
    asked = os.environ.get("FPRNN_REGISTER")
    if not __name__.startswith("lm."):
        os.environ["FPRNN_REGISTER"] = "0"
    try:
        yield
    finally:
        os.environ.pop("FPRNN_REGISTER", None)
        if asked is not None:
            os.environ["FPRNN_REGISTER"] = asked


def _find_kernels():
    """lm.kernels and "", or None and why not."""
    try:
        package = importlib.util.find_spec("lm")
    except ValueError:  # a module without a spec, that something has put into sys.modules
        return None, "the module called `lm` here is not fprnn's"
    if package is None:
        return None, "the package fprnn is not installed"
    # Looked up without running a stranger's code.
    folders = list(package.submodule_search_locations or ())
    if importlib.machinery.PathFinder.find_spec("lm.kernels", folders) is None:
        return None, f"the package `lm` at {package.origin or folders} is not fprnn's"
    try:
        with _unregistered():
            kernels = importlib.import_module("lm.kernels")
    except Exception as wrong:  # whatever a stranger, or a broken installation, may raise
        return None, f"`lm.kernels` cannot be imported: {type(wrong).__name__}: {wrong}"
    found = getattr(kernels, "INTERFACE", None)
    if found == INTERFACE:
        return kernels, ""
    return None, f"`lm.kernels` at {kernels.__file__} offers {found}, not {INTERFACE}"


def backend(operation: str, like: torch.Tensor) -> Any:
    """The module of lm.kernels that computes an operation (lm.kernels.OPERATIONS) on a tensor's
    device and in its dtype, None where the plain version does."""
    kernels = _kernels()
    return None if kernels is None else kernels.find(operation, like)


def faster(operation: str, function: str, like: torch.Tensor, *args: Any) -> Any:
    """What a function of the `backend` returns, None where the plain version is to be computed:
    there is no backend, or none for such arguments."""
    kernels = _kernels()
    return None if kernels is None else kernels.compute(operation, function, like, *args)


def _chunk_size(length):
    """Steps per chunk: the power of two at or above √length."""
    return 1 << math.ceil(math.log2(max(1.0, length**0.5)))


def _chunked(x, c):
    """(b,l,…) → (b,i,c,…), padded at the end with zeros (dt = 0 leaves the state as it is)."""
    pad = -x.shape[1] % c
    if pad:
        x = torch.cat([x, x.new_zeros(x.shape[0], pad, *x.shape[2:])], 1)
    return x.unflatten(1, (-1, c))


def _carry(first, decay_bid, local_bid):
    """States entering every chunk: s_0 = first, s_{i+1} = decay_i s_i + local_i, (b,i,d)."""
    entering, state = torch.empty_like(local_bid), first
    for i in range(decay_bid.shape[1]):
        entering[:, i] = state
        state = torch.addcmul(local_bid[:, i], decay_bid[:, i], state)
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
    """Mamba-1's selective scan (Gu & Dao 2023; paper Eq. 12), differentiable once; by a `backend`
    where there is one.

    Args:
        x: (b,l,d) input (already mixed), dt: (b,l,d) step sizes, A: (d,n) negative rates,
        B, C: (b,l,n). Computed in fp32, or fp64 if any of them is.
        h0: (b,d,n) initial state, zero if None.
        keep: (b,l) of 1, and 0 at tokens that start from an empty state; not differentiated.
    Returns:
        y (b,l,d) and the final state (b,d,n), in the dtype computed in.
    """
    inputs = _same_dtype(x, dt, A, B, C, h0, keep)
    found = faster("selective_scan", "selective_scan", inputs[0], *inputs)
    return selective_scan_plain(*inputs) if found is None else found  # type: ignore[arg-type]


def _same_dtype(*tensors):
    """All in the widest of their dtypes, fp32 at least."""
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
    """`selective_scan` in plain PyTorch, the oracle of the kernels.

    Nothing of size (b,l,d,n) is stored for the backward, which computes a slice of channels again.
    """
    x, dt, A, B, C, h0, keep = _same_dtype(x, dt, A, B, C, h0, keep)
    h0 = x.new_zeros(len(x), *A.shape) if h0 is None else h0
    size_of_channel = 4 * B.numel() * B.element_size()  # its states, and what they are made of
    width = max(1, MAX_TEMPORARY // size_of_channel)
    with torch.autocast(x.device.type, enabled=False):
        parts = [
            checkpoint(
                _scan_channels, *part, B, C, keep, use_reentrant=False, preserve_rng_state=False
            )
            for part in zip(
                x.split(width, 2), dt.split(width, 2), A.split(width), h0.split(width, 1)
            )
        ]
        y, h = zip(*parts)
        return torch.cat(y, 2), torch.cat(h, 1)


def _scan_channels(x, dt, A, h0, B, C, keep):
    """y and the final state of some channels: their states are those of one `linear_scan`."""
    decays = torch.exp(dt.unsqueeze(-1) * A)  # (b,l,d,n)
    if keep is not None:
        decays = decays * keep[..., None, None]
    written = (x * dt).unsqueeze(-1) * B.unsqueeze(2)
    h = linear_scan(decays.flatten(2), written.flatten(2), h0.flatten(1)).view_as(written)
    # No product of matrices, which a backward under autocast would round.
    return (h * C.unsqueeze(2)).sum(-1), h[:, -1].clone()


class _LinearScan(torch.autograd.Function):
    """h_t = a_t h_{t−1} + u_t; the backward is the same recurrence run the other way."""

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
        before = torch.cat([h0.unsqueeze(1), h[:, :-1]], 1)
        return g * before, g, a[:, 0] * g[:, 0]


def _linear_recurrence(a, u, h0):
    """h_t = a_t h_{t−1} + u_t over (b,l,d), all chunks at once."""
    length, c = u.shape[1], _chunk_size(u.shape[1])
    a_c, u_c = _chunked(a, c), _chunked(u, c)
    if u_c.shape[1] * c > length:  # padded steps keep the state
        a_c[:, -1, length - u_c.shape[1] * c :] = 1
    h = torch.zeros_like(u_c[:, :, 0])
    for j in range(c):
        h = torch.addcmul(u_c[:, :, j], a_c[:, :, j], h)
    h = _carry(h0, a_c.prod(2), h)
    out = torch.empty_like(u_c)
    for j in range(c):
        h = torch.addcmul(u_c[:, :, j], a_c[:, :, j], h)
        out[:, :, j] = h
    return out.flatten(1, 2)[:, :length]


def linear_scan(a: torch.Tensor, u: torch.Tensor, h0: torch.Tensor | None = None) -> torch.Tensor:
    """h_t = a_t ⊙ h_{t−1} + u_t (the vector state of FP-RNN), differentiable once.

    Args: a, u: (b,l,d). h0: (b,d), zero if None. Computed in fp32, or fp64 if any of them is.
    Returns: (b,l,d)
    """
    dtype = torch.promote_types(torch.promote_types(a.dtype, u.dtype), torch.float32)
    h0 = torch.zeros_like(u[:, 0]) if h0 is None else h0
    with torch.autocast(u.device.type, enabled=False):
        return _LinearScan.apply(a.to(dtype), u.to(dtype), h0.to(dtype))


SSD_CHUNK = 64


def ssd_decays(
    dt: torch.Tensor, A: torch.Tensor, keep: torch.Tensor | None = None, chunk: int = SSD_CHUNK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The decays of `ssd_scan`, which depend on dt and A alone. A chunk c is no longer than l.

    Args: dt: (b,l,h). A: (h,) negative. keep: (b,l), 0 at tokens that start from an empty state.
    Returns:
        between (b,i,h,c,c): from step j to step k ≥ j of a chunk; to_end (b,i,c,h): from a step to
        the chunk's end; from_start (b,i,c,h): from the chunk's start up to and with a step.
    """
    chunk = min(chunk, max(1, dt.shape[1]))
    log = _chunked(dt * A, chunk).cumsum(2)  # (b,i,c,h)
    between = (log.unsqueeze(3) - log.unsqueeze(2)).permute(0, 1, 4, 2, 3)
    allowed = torch.ones(chunk, chunk, dtype=torch.bool, device=dt.device).tril()
    alive = same_end = log.new_ones(())
    if keep is not None:
        resets = _chunked((keep == 0).long(), chunk).cumsum(2)  # (b,i,c)
        allowed = allowed & (resets.unsqueeze(3) == resets.unsqueeze(2)).unsqueeze(2)
        alive = (resets == 0).unsqueeze(-1)
        same_end = (resets == resets[:, :, -1:]).unsqueeze(-1)
    # Masked before the exponential: above the diagonal it would overflow.
    between = torch.exp(between.masked_fill(~allowed, -torch.inf))
    return between, torch.exp(log[:, :, -1:] - log) * same_end, torch.exp(log) * alive


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    h0: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2's scan, by a `backend` where there is one.

        S_t = exp(dt_t A) S_{t−1} + dt_t x_t B_tᵀ  (p×n per head),   y_t = S_t C_t

    Args:
        x: (b,l,h,p). dt: (b,l,h). A: (h,) negative. B, C: (b,l,g,n), g divides h.
        h0: (b,h,p,n), zero if None. keep: (b,l), 0 at tokens that start from an empty state.
    Returns:
        y (b,l,h,p) and the final state (b,h,p,n), in fp32, or fp64 if any input is.
    """
    inputs = *_same_dtype(x, dt, A, B, C, h0), keep
    found = faster("ssd_scan", "ssd_scan", inputs[0], *inputs)
    return ssd_scan_plain(*inputs) if found is None else found


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
    """`ssd_scan` in its chunked matrix form (state-space duality, Dao & Gu 2024): within a chunk y
    is a masked matrix product; between chunks only the states are carried."""
    x, dt, A, B, C, h0 = _same_dtype(x, dt, A, B, C, h0)
    with torch.autocast(x.device.type, enabled=False):
        length, heads, groups = x.shape[1], x.shape[2], B.shape[2]
        between, to_end, from_start = ssd_decays(dt, A, keep, chunk)
        chunk = between.shape[-1]
        per_group = heads // groups
        u = _chunked(x * dt.unsqueeze(-1), chunk)  # (b,i,c,h,p)
        B_c, C_c = _chunked(B, chunk), _chunked(C, chunk)  # (b,i,c,g,n)

        scores = torch.einsum("bikgn,bijgn->bigkj", C_c, B_c)
        scores = scores.repeat_interleave(per_group, 2) * between  # (b,i,h,c,c)
        y = torch.einsum("bihkj,bijhp->bikhp", scores, u)

        B_h = B_c.repeat_interleave(per_group, 3)
        local = torch.einsum("bichp,bichn->bihpn", u * to_end.unsqueeze(-1), B_h)
        over = from_start[:, :, -1, :, None, None]  # (b,i,h,1,1)
        state = local.new_zeros(local[:, 0].shape) if h0 is None else h0
        entering = []
        for i in range(local.shape[1]):
            entering.append(state)
            state = over[:, i] * state + local[:, i]
        entering = torch.stack(entering, 1)
        C_h = C_c.repeat_interleave(per_group, 3) * from_start.unsqueeze(-1)
        y = y + torch.einsum("bichn,bihpn->bichp", C_h, entering)
        return y.flatten(1, 2)[:, :length], state


def _few_conv(x, weight, bias):
    """`causal_conv` of few tokens: every window times the taps."""
    acc = torch.promote_types(x.dtype, torch.float32)
    taps = weight[:, 0].to(acc)
    windows = F.pad(x.to(acc), (0, 0, taps.shape[1] - 1, 0)).unfold(1, taps.shape[1], 1)
    y = (windows * taps).sum(-1)
    return (y if bias is None else y + bias).to(x.dtype)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Depthwise causal convolution over time that never looks across a document boundary.

    Args:
        x: (b,l,d). weight: (d,1,k). bias: (d,) or None. segments: (b,l) document index, or None.
        before: (b,k−1,d) the inputs before x, of document 0; zero if None.
    Returns:
        (b,l,d)
    """
    k = weight.shape[-1]
    if before is not None:
        segments = None if segments is None else F.pad(segments, (k - 1, 0))
        x = torch.cat([before.to(x.dtype), x], 1)
        return causal_conv(x, weight, bias, segments)[:, k - 1 :]
    if segments is None and x.shape[1] < 2 * k:  # few tokens: not worth what conv1d sets up
        return _few_conv(x, weight, bias)
    if segments is None:
        return F.conv1d(x.transpose(1, 2), weight, bias, padding=k - 1, groups=x.shape[-1])[
            ..., : x.shape[1]
        ].transpose(1, 2)
    taps = weight[:, 0].to(x.dtype)
    y = x * taps[:, -1]
    for lag in range(1, min(k, x.shape[1])):
        same = (segments[:, lag:] == segments[:, :-lag]).unsqueeze(-1)
        y = y + F.pad(x[:, :-lag] * same * taps[:, -1 - lag], (0, 0, lag, 0))
    return y if bias is None else y + bias
