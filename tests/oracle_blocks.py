"""Every block and the language model around it, from the formulas: a loop over tokens.

Nothing here is shared with lm. A `Block` is given a sequence that starts from nothing, so that a
packed row is as many of them as it has documents, and padding is what is not given at all
(`each_document`). Parameters are {name: tensor}, options anything with the fields of FPRNNConfig.

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
    """A token's equation was not solved: the test's parameters do not contract."""


def layer_norm(p, name, x, eps):
    centred = x - x.mean()
    scaled = centred / torch.sqrt((centred * centred).mean() + eps)
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def rms_norm(p, name, x, eps):
    return x / torch.sqrt((x * x).mean() + eps) * p[f"{name}.weight"]


def short_conv(p, name, xs):
    """silu(causal depthwise convolution) of the tokens xs, a list of (d,)."""
    taps, out = p[f"{name}.weight"][:, 0], []
    k = taps.shape[1]
    for t in range(len(xs)):
        total = p[f"{name}.bias"]
        for lag in range(min(k, t + 1)):
            total = total + taps[:, k - 1 - lag] * xs[t - lag]
        out.append(silu(total))
    return out


def solved(update, start):
    """The y with y = update(y)[0], by damped iteration to rounding, and what else update returns.

    Raises:
        NotSolved: it does not converge.
    """
    y = start
    for _ in range(3000):
        g, h = update(y)
        if (g - y).abs().max() <= 1e-14 * (1 + g.abs().max()):
            return g, h
        y = y + 0.9 * (g - y)
    raise NotSolved("the oracle's iteration of a token does not converge")


class Block:
    """A block on one sequence u (l,d_model). Subclasses make everything that depends on x alone in
    `prepare`, and define `token` and `output_of`."""

    def __init__(self, parameters, options, u):
        self.p, self.c = parameters, options
        self.zero = u.new_zeros(options.d_inner)
        self.prepare([linear(parameters, "in_proj", token) for token in u])

    def token(self, t, before, h):
        """The equation of token t, given y_{t−1} and h_{t−1}: maps y_t → (f(y)_t, h_t)."""
        raise NotImplementedError

    def output_of(self, ys):
        """The iterate (a list of (d,)) through the output gate and projection, (l,d_model)."""
        raise NotImplementedError

    def matrix(self, x_read, before):
        """Q_t, from the two things that the mixer's argument P is made of."""
        if not self.c.mixer_h_dep:
            P = x_read
        elif self.c.symm_mixer:
            P = x_read + before
        else:
            P = torch.cat([x_read, before])
        return mixer_matrix(under(self.p, "mixer"), P, self.c)

    def mixed(self, x, before):
        """y_t → x̃_t = Q_t x_t + (I − Q_t) y_t."""
        Q = self.matrix(x, before)
        from_x, rest = Q @ x, torch.eye(len(x), dtype=x.dtype) - Q
        return lambda y: from_x + rest @ y

    def iterate(self, y):
        """f(y) of the whole sequence. y: l of (d,) → the same, and the final state."""
        before, h, out = self.zero, torch.zeros((), dtype=self.zero.dtype), []
        for t in range(len(y)):
            g, h = self.token(t, before, h)(y[t])
            out.append(g)
            before = y[t]
        return out, h

    def solve(self):
        """The fixed point, token by token, l of (d,)."""
        before, h, out = self.zero, torch.zeros((), dtype=self.zero.dtype), []
        for t in range(self.length):
            before, h = solved(self.token(t, before, h), self.zero)
            out.append(before)
        return out

    def forward(self):
        """The output (l,d_model), with the gradient that options.gradient names."""
        kind, _, _ = self.c.gradient.partition(":")
        if kind in ("implicit", "exact"):  # the derivative of the solution itself
            return self.output_of(self.solve())
        with torch.no_grad():
            y = self.solve()
        for _ in range(self.c.n_backwards):
            y, _ = self.iterate(y)
        return self.output_of(y)


class Mamba(Block):
    """What FP-Mamba-1 and FP-Mamba-2 share."""

    def seen(self, before):
        """sh(y) as all but the output gate reads it."""
        if not getattr(self.c, "state_centroids", 0):  # vectors of the paper have none
            return before
        if not before.any():  # no token before
            return torch.zeros_like(before)
        vectors, sharpness = self.p["centroids.vectors"], self.p["centroids.log_sharpness"].exp()
        far = torch.stack([(before - c).square().sum() for c in vectors]) / len(before)
        weights = torch.exp(-sharpness * far / 2)
        return (weights / weights.sum()) @ vectors

    def read_from(self, name, rows, before):
        """The rows of a weight-normalised map of sh(y)."""
        return weight_normalised(self.p, name)[rows] @ before

    def both(self, t, before):
        """B_t and C_t, flat, before they are normalised."""
        B, C = self.B[t], self.C[t]
        k = len(B)
        if self.c.b_h_dep:
            B = B + self.read_from("bc_y_proj", slice(0, k), before)
        if self.c.c_h_dep:  # behind B's rows, where there are any
            C = C + self.read_from("bc_y_proj", slice(k * self.c.b_h_dep, None), before)
        return B, C

    def output_of(self, ys):
        out, before = [], self.zero
        for z, y in zip(self.z, ys):
            gated = y
            if not self.c.glu_in_loop:
                if self.c.gate_h_dep:
                    z = z + weight_normalised(self.p, "z_y_proj") @ before
                gated = silu(z) * y
            out.append(linear(self.p, "out_proj", gated))
            before = y
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

    def token(self, t, before, h):
        c, p, x, before = self.c, self.p, self.x[t], self.seen(before)
        mix, (B, C), delta = self.mixed(x, before), self.both(t, before), self.delta[t]
        if c.bc_norm:
            B, C = unit(B, c.eps), unit(C, c.eps)
        if c.dt_h_dep:
            delta = delta + self.read_from("dt_y_proj", slice(None), before)
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

    def token(self, t, before, h):
        c, p, x, before = self.c, self.p, self.x[t], self.seen(before)
        mix, delta = self.mixed(x, before), self.delta[t]
        B, C = (m.reshape(c.ngroups, c.d_state) for m in self.both(t, before))
        if c.bc_norm:
            B, C = (torch.stack([unit(row, c.eps) for row in m]) for m in (B, C))
        if c.dt_h_dep:
            delta = delta + self.read_from("dt_y_proj", slice(None), before)
        dt = softplus(delta + p["dt_bias"])
        decay = torch.exp(-dt * torch.exp(p["A_log"]))
        heads_of_group = self.heads // c.ngroups

        def update(y):
            mixed, states, out = mix(y).reshape(self.heads, c.headdim), [], []
            for head in range(self.heads):
                group = head // heads_of_group
                kept = decay[head] * (h[head] if h.ndim else h)
                state = kept + dt[head] * torch.outer(mixed[head], B[group])
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

    def token(self, t, before, h):
        decay, Q = self.decay[t], self.matrix(self.reads[t], before)

        def update(y):
            mixed = Q @ self.bx[t] + y - Q @ y
            state = decay * h + (1 - decay) * mixed
            return state, state

        return update

    def solve(self):
        """Without iterating, since y_t is the state h_t itself, in which the equation is linear:
        (I − diag(1 − λ) (I − Q)) h_t = λ h_{t−1} + (1 − λ) Q (b ⊙ x)."""
        h, out, eye = self.zero, [], torch.eye(len(self.zero), dtype=self.zero.dtype)
        for t in range(self.length):
            decay, Q = self.decay[t], self.matrix(self.reads[t], h)
            system = eye - (1 - decay)[:, None] * (eye - Q)
            h = torch.linalg.solve(system, decay * h + (1 - decay) * (Q @ self.bx[t]))
            out.append(h)
        return out

    def output_of(self, ys):
        p, out = self.p, []
        if self.c.use_short_conv:
            both = short_conv(p, "conv1d_c", [torch.cat(pair) for pair in zip(self.x, ys)])
        else:
            shifted = [self.zero, *ys[:-1]]
            both = [torch.cat(pair) for pair in zip(self.x, shifted)]
        for v, z, h in zip(both, self.z, ys):
            gated = silu(z) * silu(linear(p, "c_proj", v)) * h
            normed = rms_norm(p, "out_norm", gated, self.c.out_norm_epsilon)
            out.append(linear(p, "out_proj", normed))
        return torch.stack(out)


BLOCKS = {"fp_mamba1": Mamba1, "fp_mamba2": Mamba2, "fp_rnn": RNN}


def block_of(parameters, options, u):
    """The Block that the options name, on the sequence u (l,d_model)."""
    return BLOCKS[options.block](parameters, options, u)


def each_document(length, starts=None, mask=None):
    """The positions of one row's documents, a list of lists: cut where starts (l,) is True, without
    those where mask (l,) is False."""
    found = [[]]
    for t in range(length):
        if starts is not None and starts[t]:
            found.append([])
        if mask is None or mask[t]:
            found[-1].append(t)
    return [positions for positions in found if positions]


def by_document(function, u, starts=None, mask=None):
    """function, which maps a sequence (l,·) and its (row, positions) to (l,·), on each document of
    the batch u (b,l,·) by itself → (b,l,·), zero at padding."""
    rows = []
    for row in range(len(u)):
        tokens = {}
        here = each_document(
            u.shape[1],
            None if starts is None else starts[row],
            None if mask is None else mask[row],
        )
        for positions in here:
            out = function(u[row, positions], (row, positions))
            tokens.update(zip(positions, out))
        nothing = torch.zeros_like(next(iter(tokens.values())))
        rows.append(torch.stack([tokens.get(t, nothing) for t in range(u.shape[1])]))
    return torch.stack(rows)


def iteration(parameters, options, u, y, starts=None, mask=None):
    """f(y) of a batch. u: (b,l,d_model), y: (b,l,d) → (b,l,d)."""

    def one(u_ld, where):
        row, positions = where
        return torch.stack(block_of(parameters, options, u_ld).iterate(list(y[row, positions]))[0])

    return by_document(one, u, starts, mask)


def fixed_point(parameters, options, u, starts=None, mask=None):
    """y* of a batch, (b,l,d), without gradient."""

    def one(u_ld, _):
        return torch.stack(block_of(parameters, options, u_ld).solve())

    with torch.no_grad():
        return by_document(one, u, starts, mask)


def block_output(parameters, options, u, starts=None, mask=None):
    """The block's output on a batch, (b,l,d_model)."""
    return by_document(
        lambda u_ld, _: block_of(parameters, options, u_ld).forward(), u, starts, mask
    )


def residual_norm(parameters, name, x, options):
    """A norm of the residual stream. x: (l,d_model)."""
    return torch.stack([rms_norm(parameters, name, token, options.norm_epsilon) for token in x])


def logits_of(parameters, options, ids, mask=None):
    """The language model's logits, (b,l,vocab_size). ids: (b,l), a document ends with its EOS."""
    p, eos = parameters, options.eos_token_id
    starts = None
    if eos is not None and options.reset_at_eos:
        starts = torch.zeros_like(ids, dtype=torch.bool)
        for row in range(len(ids)):
            for t in range(1, ids.shape[1]):
                starts[row, t] = ids[row, t - 1] == eos

    def one(hidden, _):
        residual = torch.zeros_like(hidden)
        for i in range(options.n_layer):
            layer = under(p, f"backbone.layers.{i}")
            residual = residual + hidden
            read = residual_norm(layer, "norm", residual, options)
            hidden = block_of(under(layer, "block"), options, read).forward()
        hidden = residual_norm(under(p, "backbone"), "norm_f", residual + hidden, options)
        head = "backbone.embeddings" if options.tie_embeddings else "lm_head"
        return hidden @ p[f"{head}.weight"].T

    return by_document(one, p["backbone.embeddings.weight"][ids], starts, mask)


def loss_of(logits, ids):
    """The mean of −log p(next token) over all but the last positions of (b,l,v)."""
    log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
    b, length = ids.shape
    terms = [log_p[i, t, ids[i, t + 1]] for i in range(b) for t in range(length - 1)]
    return -torch.stack(terms).mean()
