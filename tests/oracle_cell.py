"""Independent solver of the exact token for the tests: plain PyTorch in fp64, token by token.

It shares no code with the kernels: reflections are applied one by one, the small equation is
U norm(v(s)) of whole vectors, its root comes from damped Picard only, its slope from autograd, and
the gradient of the root from the implicit function theorem. It is slow.

Shape suffixes: b batch, l length, d channels, n states, r reflections.
"""

import math

import torch
import torch.nn.functional as F

MAX_GAIN = 20  # limit of the gradient of a root, in units of the gradient of φ
MAX_ITERS = 1000
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "identity": lambda v: v}


def unit(v, eps):
    return v / v.norm(dim=-1, keepdim=True).clamp_min(eps)


class Reflections:
    """The map v ↦ M v with M = I − Q of a token, for all sequences."""

    def __init__(self, row, d, layout, options):
        r, self.options = options.rank, options
        raw = row[:, layout.vectors : layout.vectors + r * d].unflatten(-1, (r, d))
        self.u = unit(ACTIVATIONS[options.act](raw), options.eps)  # (b,r,d)
        self.a = options.scale * torch.sigmoid(row[:, layout.gates : layout.gates + r])
        self.shrink = torch.ones_like(self.a[:, :1])
        if options.contractive is not None:
            kappa = options.contractive
            self.shrink = kappa / self.a.sum(-1, keepdim=True).clamp_min(kappa)

    def dots(self, v):
        """Return s = U v, shape (b,r)."""
        return (self.u * v.unsqueeze(1)).sum(-1)

    def from_dots(self, s):
        """Return M v, given s = U v."""
        weights, gram = [], self.u @ self.u.transpose(1, 2)
        for i in range(self.options.rank):
            s_i = s[:, i]
            if self.options.sequential:
                s_i = s_i - sum(gram[:, i, j] * weights[j] for j in range(i))
            weights.append(self.a[:, i] * s_i)
        return self.shrink * (self.u * torch.stack(weights, 1).unsqueeze(-1)).sum(1)

    def __call__(self, v):
        mixed = v  # Q v without `shrink`
        for i in range(self.options.rank):
            source = mixed if self.options.sequential else v
            u = self.u[:, i]
            mixed = mixed - self.a[:, i : i + 1] * (u * source).sum(-1, keepdim=True) * u
        return self.shrink * (v - mixed)


class AttachGradient(torch.autograd.Function):
    """Gives a root the limited gradient (I − φ′)⁻ᵀ, or that of φ if the search failed."""

    @staticmethod
    def forward(ctx, phi, root, slope, failed):
        ctx.save_for_backward(slope, failed)
        return root.clone()

    @staticmethod
    def backward(ctx, g):
        slope, failed = ctx.saved_tensors
        matrix = (torch.eye(g.shape[1], dtype=g.dtype) - slope).transpose(1, 2)
        solved = torch.linalg.solve(matrix, g.unsqueeze(-1)).squeeze(-1)
        scale = MAX_GAIN * g.norm(dim=-1, keepdim=True) / solved.norm(dim=-1, keepdim=True)
        scale = torch.where(scale.isfinite(), scale.clamp_max(1), torch.ones_like(scale))
        return torch.where(failed.unsqueeze(-1), g, solved * scale), None, None, None


def run_picard(phi, start, tol, is_linear):
    """Return the root to which damped Picard from zero converges, and True where it fails."""
    if is_linear:  # s = Φ s + α
        alpha = phi(start)
        columns = [phi(e.expand_as(start)) - alpha for e in torch.eye(start.shape[1]).to(start)]
        matrix = torch.eye(start.shape[1]).to(start) - torch.stack(columns, -1)
        return torch.linalg.solve(matrix, alpha), torch.zeros(len(start), dtype=torch.bool)
    s, best = start.clone(), start.clone()
    step = torch.full_like(start[:, 0], 0.99)
    lowest, stalled = torch.full_like(step, math.inf), torch.zeros_like(step)
    is_done = torch.zeros_like(step, dtype=torch.bool)
    for _ in range(MAX_ITERS):
        psi = phi(s) - s
        residual = psi.abs().amax(-1)
        is_better = residual < lowest
        best = torch.where((is_better & ~is_done).unsqueeze(-1), s, best)
        lowest = torch.where(is_better & ~is_done, residual, lowest)
        stalled = torch.where(is_better, torch.zeros_like(stalled), stalled + 1)
        is_done |= residual <= tol * (1 + s.abs().amax(-1))
        if is_done.all():
            break
        needs_smaller_step = stalled >= 15
        step = torch.where(needs_smaller_step, step * 0.9, step)
        stalled = torch.where(needs_smaller_step, torch.zeros_like(stalled), stalled)
        s = torch.where(is_done.unsqueeze(-1), s, s + step.unsqueeze(-1) * psi)
    return best, ~is_done


def find_slope(phi, s):
    """Return φ′ (b,r,r), by autograd."""
    with torch.enable_grad():
        s = s.detach().requires_grad_()
        value = phi(s)
        rows = [torch.autograd.grad(v.sum(), s, retain_graph=True)[0] for v in value.unbind(-1)]
    return torch.stack(rows, 1)


def norm(v, options, weight, bias):
    if options.norm == "none":
        return v
    if options.norm == "layer":
        v = v - v.mean(-1, keepdim=True)
    v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + options.norm_eps)
    v = v if weight is None else v * weight
    return v if bias is None else v + bias


def solve_token(reflect, past, gamma, x, end, options, tol):
    """Solve y = end(past + γ x̃) with x̃ = x + M(y − x); return y, x̃ (b,d) and failed (b,)."""
    rest = x - reflect(x)

    def value(s):
        return end(past + gamma * (rest + reflect.from_dots(s)))

    def phi(s):
        return reflect.dots(value(s))

    with torch.no_grad():
        zero = torch.zeros_like(reflect.a)
        root, failed = run_picard(phi, zero, tol, options.norm == "none")
    s = AttachGradient.apply(phi(root), root, find_slope(phi, root).detach(), failed)
    return value(s), rest + reflect.from_dots(s), failed


def read_centroids(before, t, readout):
    """Read the previous state through the centroids; zero at the first token of a document.

    Args:
        before: (b,d), zero at the first token of a document.
        t: The token.
        readout: Readout of lm.kernels.cell_arguments, or None.
    """
    if readout is None:
        return before
    keys, key_bias, values, noise = readout
    has_token_before = (before.abs().sum(-1, keepdim=True) > 0).to(before.dtype)
    if noise is not None:
        before = before + noise[:, t]
    weights = torch.stack([(before * key).sum(-1) + b for key, b in zip(keys, key_bias)]).exp()
    read = sum(w.unsqueeze(-1) * v for w, v in zip(weights / weights.sum(0), values))
    return read * has_token_before


def make_row(t, keep, before, raw, weight_y, readout=None):
    """Return the projections of token t from x and the previous state, and keep (b,1)."""
    keep_t = torch.ones(len(raw), 1, dtype=raw.dtype) if keep is None else keep[:, t : t + 1]
    read = read_centroids(before * keep_t, t, readout) @ weight_y.t()
    row = raw[:, t] + F.pad(read, (0, raw.shape[-1] - read.shape[-1]))
    return row, keep_t


def solve_cell(arguments, tol=1e-14):
    """Solve the problem of lm.kernels.cpu.cpu_cell.cell."""
    if arguments.A.dim() == 3:
        return _solve_rnn(arguments)
    layout, options, raw, weight_y, x, dt, A, keep, gate, D, *more = arguments
    norm_weight, norm_bias, y0, h0, _, readout = more
    b, length, d = x.shape
    heads = len(A) if A.dim() == 1 else None  # FP-Mamba-2 has a decay rate per head
    group_width = d // options.groups
    n = A.shape[1] if heads is None else options.states
    y = x.new_zeros(b, d) if y0 is None else y0
    h = x.new_zeros(b, d, n) if h0 is None else h0.reshape(b, d, n)
    ys, failures = [], []
    for t in range(length):
        row, keep_t = make_row(t, keep, y, raw, weight_y, readout)
        reflect = Reflections(row, d, layout, options)
        B, C = (
            row[:, at : at + options.groups * n].unflatten(-1, (options.groups, n))
            for at in (layout.B, layout.C)
        )
        if options.bc_norm:
            B, C = unit(B, options.eps), unit(C, options.eps)
        bc = (B * C).sum(-1).repeat_interleave(group_width, -1)
        B, C = (m.repeat_interleave(group_width, 1) for m in (B, C))  # (b,d,n)
        step = dt[:, t] if heads is None else dt[:, t].repeat_interleave(d // heads, -1)
        rate = A if heads is None else A.repeat_interleave(d // heads).unsqueeze(-1)
        h = torch.exp(step.unsqueeze(-1) * rate) * h * keep_t.unsqueeze(-1)
        gates = 1 if gate is None else gate[:, t]
        gamma = step * bc + D

        def end(v, gates=gates):  # a default binds the gates of this token
            return norm(gates * v, options, norm_weight, norm_bias)

        past = (h * C).sum(-1)
        y, mixed, failed = solve_token(reflect, past, gamma, x[:, t], end, options, tol)
        h = h + (step * mixed).unsqueeze(-1) * B
        ys.append(y)
        failures.append(failed)
    h = h if heads is None else h.unflatten(1, (heads, d // heads))
    return torch.stack(ys, 1), h, torch.stack(failures, 1)


def _solve_rnn(arguments):
    layout, options, raw, weight_y, x, dt, decay, keep, *_ = arguments
    y = torch.zeros_like(x[:, 0]) if arguments.y0 is None else arguments.y0
    h = torch.zeros_like(y) if arguments.h0 is None else arguments.h0
    ys, failures = [], []
    for t in range(x.shape[1]):
        row, keep_t = make_row(t, keep, y, raw, weight_y)
        reflect = Reflections(row, x.shape[2], layout, options)
        past = decay[:, t] * keep_t * h
        y, _, failed = solve_token(reflect, past, dt[:, t], x[:, t], lambda v: v, options, 0)
        h = y
        ys.append(y)
        failures.append(failed)
    return torch.stack(ys, 1), h, torch.stack(failures, 1)
