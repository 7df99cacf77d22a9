"""A layer's exact solve, token by token, as a function of tensors alone: a kernel's, or this.

Shape suffixes: b batch, l length, d channels, n states, r reflections, K columns of raw.

`lm.kernels.cpu.cell` has the equations and what the arguments are. Under torch.compile and
torch.export the solve is one operator, which takes the kernel where it runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cell import Norm, Token, solve_low_rank
from .gradient import clipped
from .mixers import ACTIVATIONS, nrm, reflections_of
from .opaque import compiling, opaque
from .scan import faster


def whole_solve(
    layout: tuple[int, ...],
    options: tuple[Any, ...],
    tensors: tuple[Any, ...],
    adjoint: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """y (b,l,d), the state after the last token, and the outcome (b,l), see solver.py;
    None: there is no kernel.

    Args:
        layout, options: as lm.kernels.cpu.cell has them, `adjoint_clip` None for none.
        tensors: raw, weight_y, x, dt, A, keep, gate, D, norm_weight, norm_bias, y0, h0, as `cell`
        there has them; of an FP-RNN dt is `fresh`, A is `decay`, both (b,l,d).
        adjoint: as there; left as it is under a compiler.
    """
    if compiling():
        y, h, outcome = _operator(*tensors, list(layout), *options)
        return y, h.detach(), outcome
    return _by_kernel(layout, options, tensors, adjoint)


def _by_kernel(layout, options, tensors, adjoint):
    raw, weight_y, x, dt, A, keep, *others, y0, h0 = tensors
    *most, clip, states = options
    options = (*most, float("inf") if clip is None else clip, states)
    if A.dim() == 3:
        given = raw, weight_y, x, A, dt, keep, y0, h0, adjoint
        return faster("cell", "cell_rnn", x, layout, options, *given)
    given = raw, weight_y, x, dt, A, keep, *others, y0, h0, adjoint
    return faster("cell", "cell", x, layout, options, *given)


def _whole_solve(
    raw: Tensor,
    weight_y: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    keep: Tensor | None,
    gate: Tensor | None,
    D: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    y0: Tensor | None,
    h0: Tensor | None,
    layout: list[int],
    rank: int,
    scale: float,
    act: str,
    sequential: bool,
    eps: float,
    contractive: float | None,
    bc_norm: bool,
    groups: int,
    norm: str,
    norm_eps: float,
    adjoint_clip: float | None,
    states: int,
) -> tuple[Tensor, Tensor, Tensor]:
    mixer = rank, scale, act, sequential, eps, contractive
    options = *mixer, bc_norm, groups, norm, norm_eps, adjoint_clip, states
    tensors = raw, weight_y, x, dt, A, keep, gate, D, norm_weight, norm_bias, y0, h0
    found = _by_kernel(tuple(layout), options, tensors, None)
    if found is None:
        found = whole_solve_plain(tuple(layout), options, tensors)
    y, h, outcome = found
    return y, h.contiguous(), outcome


def _shapes(raw, weight_y, x, dt, A, *others):
    b, _, d = x.shape
    states = others[-1]
    state: tuple[int, ...]
    if A.dim() == 2:
        state = (b, d, A.shape[1])
    elif A.dim() == 1:
        state = (b, len(A), d // len(A), states)
    else:
        state = (b, d)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(state), torch.empty(x.shape[:2], dtype=torch.uint8, device=x.device)


_operator = opaque(_whole_solve, _shapes, 1)


def whole_solve_plain(
    layout: tuple[int, ...], options: tuple[Any, ...], tensors: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """`whole_solve` as a loop over time, differentiable; its arguments."""
    raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0 = tensors
    norm, clip = Norm(options[8], weight, bias, options[9]), options[10]
    shapes = _shapes(*tensors, *options)
    y = torch.zeros_like(x[:, 0]) if y0 is None else y0
    h = torch.zeros_like(shapes[1]) if h0 is None else h0.to(x.dtype)
    ys, outcomes = [], []
    longest: list[Tensor] = []
    for t in range(x.shape[1]):
        y = _clipping(y, clip, longest)
        before, row, now = y, raw[:, t], x[:, t]
        if keep is not None:
            alive = keep[:, t, None].to(x.dtype)
            before, h = before * alive, h * alive.view(-1, *[1] * (h.dim() - 1))
        if len(weight_y):
            row = row + F.pad(before @ weight_y.t(), (0, row.shape[-1] - len(weight_y)))
        time = _recurrence(h, row, dt[:, t], A[:, t] if A.dim() == 3 else A, layout, options)
        gain = time.gain if D is None else time.gain + D
        token = Token(now, time.history, gain, None if gate is None else gate[:, t], norm)
        y, mixed, outcome = solve_low_rank(token, _low_rank(row, now.shape[-1], layout, options))
        h = time.state + time.grown(mixed)
        ys.append(y)
        outcomes.append(outcome)
    y = torch.stack(ys, 1)
    if clip is not None and y.requires_grad:
        y.register_hook(lambda v: longest.append(torch.linalg.vector_norm(v, dim=-1).amax(1, True)))
    return y, h, torch.stack(outcomes, 1)


def _clipping(y, clip, longest):
    """y (b,d), through which the gradient of later tokens is `clipped`. longest: a list that
    will hold the length of the longest gradient of each sequence, (b,1)."""
    if clip is None or not y.requires_grad:
        return y
    link = y.view_as(y)
    link.register_hook(lambda g: clipped(g.unsqueeze(1), clip, longest[-1])[:, 0])
    return link


def _low_rank(row, d, layout, options):
    """I − Q of the tokens of a row (b,K), a LowRank."""
    rank, scale, act, sequential, eps, kappa, *_ = options
    u = row[:, layout[0] : layout[0] + rank * d].unflatten(-1, (rank, d))
    a = scale * torch.sigmoid(row[:, layout[1] : layout[1] + rank])
    found = reflections_of(a, nrm(ACTIVATIONS[act](u), eps), sequential)
    if kappa is None:
        return found
    shrink = kappa / a.sum(-1, keepdim=True).clamp_min(kappa)
    return found._replace(T=found.T * shrink.unsqueeze(-1))


class _Time(NamedTuple):
    """What the recurrence says of one token before it is solved."""

    history: Tensor  # (b,d) its output without the token
    state: Tensor  # without the token
    gain: Tensor  # (b,d) what its output has of x̃
    grown: Callable[[Tensor], Tensor]  # x̃ (b,d) → what the token adds to the state


def _recurrence(h, row, dt, A, layout, options):
    """_Time. h: the state before. row: (b,K). dt, A: of this token."""
    if A.dim() == 2 and A.shape == h.shape:  # FP-RNN's decay
        past = A * h
        return _Time(past, past, dt, lambda mixed: dt * mixed)
    *_, eps, _, bc_norm, groups, _, _, _, _ = options
    n = h.shape[-1]
    B, C = (row[:, at : at + groups * n].unflatten(-1, (groups, n)) for at in layout[2:])
    if bc_norm:
        B, C = nrm(B, eps), nrm(C, eps)
    if A.dim() == 2:  # FP-Mamba-1
        past = torch.exp(dt.unsqueeze(-1) * A) * h
        gain = dt * (B * C).sum(-1)
        return _Time((past * C).sum(-1), past, gain, lambda mixed: (dt * mixed).unsqueeze(-1) * B)
    B, C = (part.repeat_interleave(len(A) // groups, 1).unsqueeze(2) for part in (B, C))
    past = torch.exp(dt * A)[..., None, None] * h
    wide = h.shape[2]

    def grown(mixed):
        return (dt.unsqueeze(-1) * mixed.unflatten(-1, (-1, wide))).unsqueeze(-1) * B

    gain = (dt * (B * C).sum((-2, -1))).repeat_interleave(wide, -1)
    return _Time((past * C).sum(-1).flatten(1), past, gain, grown)
