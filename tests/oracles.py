"""Reference recurrences and mixers, one time step and one matrix at a time.

They are written from the formulas and share no code with lm (tests/oracle_blocks.py has the blocks
and the language model). `parameters` and `p` are {name: tensor} as in a state_dict; `options` and
`c` are any object with the fields of FPRNNConfig. Autograd gives all gradients.
"""

import math

import torch


def sequential_scan(x, dt, A, B, C, h0=None, keep=None):
    """Compute Mamba-1's recurrence step by step; shapes as in `selective_scan`."""
    h = x.new_zeros(x.shape[0], x.shape[2], A.shape[1]) if h0 is None else h0
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        if keep is not None:
            decay = decay * keep[:, t, None, None]
        h = decay * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        ys.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(ys, 1), h


def sequential_ssd(x, dt, A, B, C, h0=None, keep=None):
    """Compute Mamba-2's recurrence step by step; shapes as in `ssd_scan`."""
    b, length, heads, p = x.shape
    per_group = heads // B.shape[2]
    S = x.new_zeros(b, heads, p, B.shape[3]) if h0 is None else h0
    ys = []
    for t in range(length):
        decay = torch.exp(dt[:, t] * A)
        if keep is not None:
            decay = decay * keep[:, t, None]
        B_t, C_t = (m[:, t].repeat_interleave(per_group, 1) for m in (B, C))
        u = dt[:, t, :, None] * x[:, t]
        S = decay[..., None, None] * S + u.unsqueeze(-1) * B_t.unsqueeze(-2)
        ys.append((S * C_t.unsqueeze(-2)).sum(-1))
    return torch.stack(ys, 1), S


def scan_inputs(b, length, d, n, dtype=torch.float64):
    """Return {"x", "dt", "A", "B", "C", "h0"} of a selective scan, the same at every call."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = {
        "x": randn(b, length, d),
        "dt": torch.nn.functional.softplus(randn(b, length, d)),
        "A": -torch.exp(randn(d, n)),
        "B": randn(b, length, n),
        "C": randn(b, length, n),
        "h0": randn(b, d, n),
    }
    return {k: v.to(dtype) for k, v in tensors.items()}


# Maps and activations.


def under(parameters, prefix):
    """Return the parameters whose names begin with `prefix.`, without this prefix."""
    start = f"{prefix}."
    return {k[len(start) :]: v for k, v in parameters.items() if k.startswith(start)}


def linear(parameters, name, x):
    """Return W x, plus the bias if the layer has one. x: (in,) → (out,)."""
    out = parameters[f"{name}.weight"] @ x
    bias = parameters.get(f"{name}.bias")
    return out if bias is None else out + bias


def weight_normalised(parameters, name):
    """Return W of a weight-normalised map; each row is its gain times its unit direction."""
    v = parameters[f"{name}.direction"]
    return parameters[f"{name}.gain"] * v / torch.sqrt((v * v).sum(1, keepdim=True))


def silu(x):
    return x / (1 + torch.exp(-x))


def softplus(x):
    return torch.log1p(torch.exp(x))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def unit(v, eps):
    """Return v / max(‖v‖₂, eps)."""
    length = torch.sqrt((v * v).sum())
    return v / (length if length > eps else eps)


# Mixers.


def activation(name, x):
    return {"silu": silu(x), "relu": torch.where(x > 0, x, 0 * x), "identity": x}[name]


def triangle(entries, m):
    """Return S = T Tᵀ, where T (m,m) is upper triangular and filled row by row."""
    rows = []
    for i in range(m):
        row, entries = entries[: m - i], entries[m - i :]
        rows.append(torch.cat([entries.new_zeros(i), row]))
    T = torch.stack(rows)
    return T @ T.T


def estimated_radius(S, steps):
    """Return the paper's estimate of the largest eigenvalue, x_{k−1}ᵀ S x_k, by power iteration."""
    x = torch.full_like(S[0], 1 / math.sqrt(len(S)))
    for _ in range(steps):
        previous = x
        x = S @ x
        x = x / torch.sqrt((x * x).sum())
    return previous @ (S @ x)


def reflections(p, P, c, rank, proj_rank, product):
    """Return Q of r reflections with gates a: their product, or I − k Σ a u uᵀ.

    In the product the first reflection acts first.
    """
    d, k = c.d_inner, factor(c)
    projected = P if proj_rank is None else weight_normalised(p, "u_down") @ P
    raw = weight_normalised(p, "u_proj") @ projected
    gates = sigmoid(weight_normalised(p, "alpha_proj") @ P + p["alpha_proj.bias"])
    Q = eye = torch.eye(d, dtype=P.dtype)
    for i in range(rank):
        u = unit(activation(c.mixer_act, raw[i * d : (i + 1) * d]), c.eps)
        term = k * gates[i] * torch.outer(u, u)
        Q = (eye - term) @ Q if product else Q - term
    return Q


def factor(c):
    """Return k in I − k S: 2 for eigenvalues in [−1, 1], else 1."""
    return 2 if c.eigen_range == "signed" else 1


def kronecker(p, P, c):
    """Return Q of the map X ↦ X − k K₁ᵀ X K₂ᵀ, with X (m₁,m₂) flattened row by row."""
    d = c.d_inner
    m1 = max(m for m in range(1, d + 1) if d % m == 0 and m * m <= d)
    sizes = m1, d // m1
    entries = activation(c.mixer_act, weight_normalised(p, "uv_proj") @ P)
    gates = sigmoid(weight_normalised(p, "gate_proj") @ P + p["gate_proj.bias"])
    factors = []
    for m in sizes:
        count = m * (m + 1) // 2
        S = torch.stack([unit(row, c.eps) for row in triangle(entries[:count], m)])
        if c.kronecker_norm == "spectral":
            S = S / (estimated_radius(S, 16) + c.eps)
        factors.append(gates[:m, None] * S)
        entries, gates = entries[count:], gates[m:]
    product = torch.einsum("ai,jb->ijab", *factors).reshape(d, d)
    return torch.eye(d, dtype=P.dtype) - factor(c) * product


def monarch(p, P, c):
    """Return the block-diagonal Q with blocks I − k a S.

    S is T Tᵀ / (its largest column norm + eps).
    """
    size = c.mixer_rank
    blocks, count = c.d_inner // size, size * (size + 1) // 2
    entries = activation(c.mixer_act, weight_normalised(p, "uv_proj") @ P)
    gates = sigmoid(weight_normalised(p, "gate_proj") @ P + p["gate_proj.bias"])
    parts = []
    for i in range(blocks):
        S = triangle(entries[i * count : (i + 1) * count], size)
        S = S / (max(torch.sqrt((column * column).sum()) for column in S.T) + c.eps)
        parts.append(torch.eye(size, dtype=P.dtype) - factor(c) * gates[i] * S)
    return torch.block_diag(*parts)


def nonselective(p):
    """Return Q = base · exp(X − Xᵀ), the same for every token; X is the weight's lower triangle."""
    X = torch.tril(p["q_proj.weight"])
    return p["q_proj.base"] @ torch.matrix_exp(X - X.T)


def selective_dense(p, P, c):
    S = triangle(activation(c.mixer_act, weight_normalised(p, "uv_proj") @ P), c.d_inner)
    x = torch.full_like(S[0], 1 / math.sqrt(len(S)))
    for _ in range(32):
        image = S @ x
        size = torch.sqrt((image * image).sum())
        x = image / (size + c.eps)
    return S / (size + c.eps)


def free_matrix(p, P, c):
    """Return Q_t without the bound of `contractive`."""
    if c.mixer in ("householder", "dplr"):
        product = c.mixer == "householder"
        return reflections(p, P, c, c.mixer_rank, c.mixer_proj_rank, product)
    if c.mixer == "mixture":
        Q = torch.eye(c.d_inner, dtype=P.dtype)
        for i in range(c.mixer_rank):
            part = under(p, f"parts.{i}")
            matrix = kronecker(part, P, c) if i % 2 else reflections(part, P, c, 1, None, True)
            Q = matrix @ Q
        return Q
    if c.mixer == "nonselective":
        return nonselective(p)
    return {"kronecker": kronecker, "monarch": monarch, "selective_dense": selective_dense}[
        c.mixer
    ](p, P, c)


def mixer_matrix(p, P, c):
    """Return Q_t of a token, shape (d,d), with M(P; v) = Q_t v.

    Args:
        p: Parameters and buffers of the mixer by name.
        P: Argument of the mixer, shape (p,).
        c: Options.
    """
    if c.contractive is None:
        return free_matrix(p, P, c)
    p = under(p, "mixer")
    Q, eye = free_matrix(p, P, c), torch.eye(c.d_inner, dtype=P.dtype)
    if c.mixer in ("householder", "dplr"):
        gates = sigmoid(weight_normalised(p, "alpha_proj") @ P + p["alpha_proj.bias"])
        bound = factor(c) * gates.sum()
    else:
        difference = (eye - Q).abs()
        bound = torch.sqrt(difference.sum(0).max() * difference.sum(1).max())
    shrink = c.contractive / bound if bound > c.contractive else 1.0
    return eye - shrink * (eye - Q)
