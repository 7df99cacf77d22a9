"""Reference blocks and language model: loops over tokens, written from the formulas.

They share no code with lm. A `Block` reads one sequence from an empty state. So a packed row needs
a block for each document, and padding is left out (`each_document`). Parameters are {name: tensor};
options are any object with the fields of FPRNNConfig.

Shapes: l tokens, d channels (d_inner), n states; h heads, g groups, p head dimension.
"""

import torch

from tests.oracles import (
    linear,
    mixer_matrix,
    sigmoid,
    silu,
    softplus,
    under,
    unit,
    weight_normalised,
)


class NotSolved(AssertionError):
    """Error for an unsolved token equation, because the parameters do not contract."""


def layer_norm(p, name, x, eps):
    centred = x - x.mean()
    scaled = centred / torch.sqrt((centred * centred).mean() + eps)
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def rms_norm(p, name, x, eps):
    return x / torch.sqrt((x * x).mean() + eps) * p[f"{name}.weight"]


def short_conv(p, name, xs):
    """Return silu(causal depthwise convolution) of the tokens xs, a list of (d,)."""
    taps, out = p[f"{name}.weight"][:, 0], []
    k = taps.shape[1]
    for t in range(len(xs)):
        total = p[f"{name}.bias"]
        for lag in range(min(k, t + 1)):
            total = total + taps[:, k - 1 - lag] * xs[t - lag]
        out.append(silu(total))
    return out


def solve_token(update, start):
    """Solve y = update(y)[0] by damped iteration to rounding.

    Returns:
        y and the second value of `update`.

    Raises:
        NotSolved: If the iteration does not converge.
    """
    y = start
    for _ in range(3000):
        g, h = update(y)
        if (g - y).abs().max() <= 1e-14 * (1 + g.abs().max()):
            return g, h
        y = y + 0.9 * (g - y)
    raise NotSolved("the reference iteration of a token does not converge")


class Block:
    """A block on one sequence u (l,d_model).

    Subclasses compute everything that depends only on x in `prepare`, and define `token` and
    `compute_output`.
    """

    def __init__(self, parameters, options, u):
        self.p, self.c = parameters, options
        self.zero = u.new_zeros(options.d_inner)
        self.prepare([linear(parameters, "in_proj", token) for token in u])

    def token(self, t, previous, h):
        """Return the equation of token t, given y_{t−1} and h_{t−1}, as y_t → (f(y)_t, h_t)."""
        raise NotImplementedError

    def compute_output(self, ys):
        """Apply the output gate and projection to the iterate, a list of (d,) → (l,d_model)."""
        raise NotImplementedError

    def matrix(self, x_read, previous):
        """Return Q_t; x_read and previous are the parts of the mixer's argument P."""
        if not self.c.mixer_h_dep:
            P = x_read
        elif self.c.symm_mixer:
            P = x_read + previous
        else:
            P = torch.cat([x_read, previous])
        return mixer_matrix(under(self.p, "mixer"), P, self.c)

    def mixed(self, x, previous):
        """Return the function y_t → x̃_t = Q_t x_t + (I − Q_t) y_t."""
        Q = self.matrix(x, previous)
        from_x, complement = Q @ x, torch.eye(len(x), dtype=x.dtype) - Q
        return lambda y: from_x + complement @ y

    def iterate(self, y):
        """Return f(y) of the whole sequence, and the final state; y is a list of l tokens (d,)."""
        previous, h, out = self.zero, torch.zeros((), dtype=self.zero.dtype), []
        for t in range(len(y)):
            g, h = self.token(t, previous, h)(y[t])
            out.append(g)
            previous = y[t]
        return out, h

    def solve(self):
        """Return the fixed point, computed token by token, as a list of l tokens (d,)."""
        previous, h, out = self.zero, torch.zeros((), dtype=self.zero.dtype), []
        for t in range(self.length):
            previous, h = solve_token(self.token(t, previous, h), self.zero)
            out.append(previous)
        return out

    def forward(self):
        """Return the output (l,d_model), with the gradient that options.gradient selects."""
        kind, _, _ = self.c.gradient.partition(":")
        if kind in ("implicit", "exact"):  # the derivative of the solution itself
            return self.compute_output(self.solve())
        with torch.no_grad():
            y = self.solve()
        for _ in range(self.c.n_backwards):
            y, _ = self.iterate(y)
        return self.compute_output(y)


class Mamba(Block):
    """Common parts of FP-Mamba-1 and FP-Mamba-2."""

    def shifted(self, previous):
        """Return sh(y) as everything except the output gate reads it."""
        if not getattr(self.c, "state_centroids", 0):  # the paper's configs lack this field
            return previous
        if not previous.any():  # the first token
            return torch.zeros_like(previous)
        keys, key_bias = self.p["centroids.keys"], self.p["centroids.key_bias"]
        scores = torch.stack([key @ previous + bias for key, bias in zip(keys, key_bias)])
        weights = torch.exp(scores - scores.max())
        return (weights / weights.sum()) @ self.p["centroids.vectors"]

    def read_from(self, name, rows, previous):
        """Apply rows of a weight-normalised map to sh(y)."""
        return weight_normalised(self.p, name)[rows] @ previous

    def input_and_output(self, t, previous):
        """Return B_t and C_t, flat and not yet normalised."""
        B, C = self.B[t], self.C[t]
        k = len(B)
        if self.c.b_h_dep:
            B = B + self.read_from("bc_y_proj", slice(0, k), previous)
        if self.c.c_h_dep:  # these rows follow B's rows, if it has any
            first_row = k if self.c.b_h_dep else 0
            C = C + self.read_from("bc_y_proj", slice(first_row, None), previous)
        return B, C

    def compute_output(self, ys):
        out, previous = [], self.zero
        for z, y in zip(self.z, ys):
            gated = y
            if not self.c.glu_in_loop:
                if self.c.gate_h_dep:
                    z = z + weight_normalised(self.p, "z_y_proj") @ previous
                gated = silu(z) * y
            out.append(linear(self.p, "out_proj", gated))
            previous = y
        return torch.stack(out)


class Mamba1(Mamba):
    def prepare(self, projected):
        c, p = self.c, self.p
        self.length = len(projected)
        self.x = [v[: c.d_inner] for v in projected]
        self.z = [v[c.d_inner :] for v in projected]
        if c.use_short_conv:
            self.x = short_conv(p, "conv1d", self.x)
        parts = [linear(p, "x_proj", x).split([c.dt_rank, c.d_state, c.d_state]) for x in self.x]
        self.delta, self.B, self.C = zip(*parts)

    def token(self, t, previous, h):
        c, p, x, previous = self.c, self.p, self.x[t], self.shifted(previous)
        mix, (B, C), delta = (
            self.mixed(x, previous),
            self.input_and_output(t, previous),
            self.delta[t],
        )
        if c.bc_norm:
            B, C = unit(B, c.eps), unit(C, c.eps)
        if c.dt_h_dep:
            delta = delta + self.read_from("dt_y_proj", slice(None), previous)
        dt = softplus(linear(p, "dt_proj", delta))
        carried = torch.exp(-dt[:, None] * torch.exp(p["A_log"])) * h

        def update(y):
            mixed = mix(y)
            state = carried + torch.outer(dt * mixed, B)
            o = state @ C + p["D"] * mixed
            if c.glu_in_loop:
                o = o * silu(self.z[t])
            return layer_norm(p, "out_norm", o, c.out_norm_epsilon), state

        return update


class Mamba2(Mamba):
    def prepare(self, projected):
        c, p = self.c, self.p
        self.length, self.heads = len(projected), c.d_inner // c.headdim
        bc = c.ngroups * c.d_state
        widths = [c.d_inner, c.d_inner + 2 * bc, self.heads]
        self.z, xbc, self.delta = zip(*[v.split(widths) for v in projected])
        if c.use_short_conv:
            xbc = short_conv(p, "conv1d", list(xbc))
        self.x, self.B, self.C = zip(*[v.split([c.d_inner, bc, bc]) for v in xbc])

    def token(self, t, previous, h):
        c, p, x, previous = self.c, self.p, self.x[t], self.shifted(previous)
        mix, delta = self.mixed(x, previous), self.delta[t]
        B, C = (m.reshape(c.ngroups, c.d_state) for m in self.input_and_output(t, previous))
        if c.bc_norm:
            B, C = (torch.stack([unit(row, c.eps) for row in m]) for m in (B, C))
        if c.dt_h_dep:
            delta = delta + self.read_from("dt_y_proj", slice(None), previous)
        dt = softplus(delta + p["dt_bias"])
        decay = torch.exp(-dt * torch.exp(p["A_log"]))
        heads_of_group = self.heads // c.ngroups

        def update(y):
            mixed, states, out = mix(y).reshape(self.heads, c.headdim), [], []
            for head in range(self.heads):
                group = head // heads_of_group
                carried = decay[head] * (h[head] if h.ndim else h)
                state = carried + dt[head] * torch.outer(mixed[head], B[group])
                out.append(state @ C[group] + p["D"][head] * mixed[head])
                states.append(state)
            gated = torch.cat(out) * silu(self.z[t])
            return rms_norm(p, "out_norm", gated, c.out_norm_epsilon), torch.stack(states)

        return update


class RNN(Block):
    def prepare(self, projected):
        c, p = self.c, self.p
        self.length = len(projected)
        x0 = [v[: c.d_inner] for v in projected]
        self.z = [v[c.d_inner :] for v in projected]
        named = dict.fromkeys(("x", "b", "mixer", "lambda"), x0)
        if c.use_short_conv:
            named = {name: short_conv(p, f"conv1d_{name}", x0) for name in named}
        self.x, self.reads = named["x"], named["mixer"]
        self.bx = [silu(linear(p, "b_proj", v)) * x for v, x in zip(named["b"], self.x)]
        self.decay = [sigmoid(linear(p, "lambda_proj", v)) for v in named["lambda"]]

    def token(self, t, previous, h):
        decay, Q = self.decay[t], self.matrix(self.reads[t], previous)

        def update(y):
            mixed = Q @ self.bx[t] + y - Q @ y
            state = decay * h + (1 - decay) * mixed
            return state, state

        return update

    def solve(self):
        """Solve without iterating: y_t is the state h_t, and the equation is linear in it.

        (I − diag(1 − λ) (I − Q)) h_t = λ h_{t−1} + (1 − λ) Q (b ⊙ x).
        """
        h, out, eye = self.zero, [], torch.eye(len(self.zero), dtype=self.zero.dtype)
        for t in range(self.length):
            decay, Q = self.decay[t], self.matrix(self.reads[t], h)
            system = eye - (1 - decay)[:, None] * (eye - Q)
            h = torch.linalg.solve(system, decay * h + (1 - decay) * (Q @ self.bx[t]))
            out.append(h)
        return out

    def compute_output(self, ys):
        p, out = self.p, []
        if self.c.use_short_conv:
            inputs = short_conv(p, "conv1d_c", [torch.cat(pair) for pair in zip(self.x, ys)])
        else:
            shifted = [self.zero, *ys[:-1]]
            inputs = [torch.cat(pair) for pair in zip(self.x, shifted)]
        for v, z, h in zip(inputs, self.z, ys):
            gated = silu(z) * silu(linear(p, "c_proj", v)) * h
            normed = rms_norm(p, "out_norm", gated, self.c.out_norm_epsilon)
            out.append(linear(p, "out_proj", normed))
        return torch.stack(out)


BLOCKS = {"fp_mamba1": Mamba1, "fp_mamba2": Mamba2, "fp_rnn": RNN}


def block_of(parameters, options, u):
    """Return the Block that the options select, on the sequence u (l,d_model)."""
    return BLOCKS[options.block](parameters, options, u)


def each_document(length, starts=None, mask=None):
    """Return the positions of each document in a row, as a list of lists.

    A document begins at each True of starts (l,). Positions with mask (l,) False are left out.
    """
    documents = [[]]
    for t in range(length):
        if starts is not None and starts[t]:
            documents.append([])
        if mask is None or mask[t]:
            documents[-1].append(t)
    return [positions for positions in documents if positions]


def by_document(function, u, starts=None, mask=None):
    """Apply a function to each document of a batch separately.

    Args:
        function: Maps a sequence (l,·) and its (row, positions) to (l,·).
        u: Batch, shape (b,l,·).
        starts: True at the first token of a document, shape (b,l), or None.
        mask: False at padding, shape (b,l), or None.

    Returns:
        The outputs, shape (b,l,·), zero at padding.
    """
    rows = []
    for row in range(len(u)):
        tokens = {}
        documents = each_document(
            u.shape[1], None if starts is None else starts[row], None if mask is None else mask[row]
        )
        for positions in documents:
            out = function(u[row, positions], (row, positions))
            tokens.update(zip(positions, out))
        zero = torch.zeros_like(next(iter(tokens.values())))
        rows.append(torch.stack([tokens.get(t, zero) for t in range(u.shape[1])]))
    return torch.stack(rows)


def apply_map(parameters, options, u, y, starts=None, mask=None):
    """Return f(y) of a batch. u: (b,l,d_model), y: (b,l,d) → (b,l,d)."""

    def iterate(u_ld, row_and_positions):
        row, positions = row_and_positions
        return torch.stack(block_of(parameters, options, u_ld).iterate(list(y[row, positions]))[0])

    return by_document(iterate, u, starts, mask)


def solve(parameters, options, u, starts=None, mask=None):
    """Return y* of a batch, shape (b,l,d), without gradient."""

    def solve_document(u_ld, _):
        return torch.stack(block_of(parameters, options, u_ld).solve())

    with torch.no_grad():
        return by_document(solve_document, u, starts, mask)


def block_output(parameters, options, u, starts=None, mask=None):
    """Return the block's output on a batch, shape (b,l,d_model)."""
    return by_document(
        lambda u_ld, _: block_of(parameters, options, u_ld).forward(), u, starts, mask
    )


def residual_norm(parameters, name, x, options):
    """Apply a norm of the residual stream to x (l,d_model)."""
    return torch.stack([rms_norm(parameters, name, token, options.norm_epsilon) for token in x])


def compute_logits(parameters, options, ids, mask=None):
    """Return the language model's logits (b,l,vocab_size); in ids (b,l) EOS ends a document."""
    p, eos = parameters, options.eos_token_id
    starts = None
    if eos is not None and options.reset_at_eos:
        starts = torch.zeros_like(ids, dtype=torch.bool)
        for row in range(len(ids)):
            for t in range(1, ids.shape[1]):
                starts[row, t] = ids[row, t - 1] == eos

    def compute_document_logits(hidden, _):
        residual = torch.zeros_like(hidden)
        for i in range(options.n_layer):
            layer = under(p, f"backbone.layers.{i}")
            residual = residual + hidden
            read = residual_norm(layer, "norm", residual, options)
            hidden = block_of(under(layer, "block"), options, read).forward()
        hidden = residual_norm(under(p, "backbone"), "norm_f", residual + hidden, options)
        head = "backbone.embeddings" if options.tie_embeddings else "lm_head"
        return hidden @ p[f"{head}.weight"].T

    return by_document(compute_document_logits, p["backbone.embeddings.weight"][ids], starts, mask)


def compute_loss(logits, ids):
    """Return the mean of −log p(next token) over all positions of (b,l,v) except the last."""
    log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
    b, length = ids.shape
    terms = [log_p[i, t, ids[i, t + 1]] for i in range(b) for t in range(length - 1)]
    return -torch.stack(terms).mean()
