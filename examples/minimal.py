"""FP-Mamba in one file: the layer, its exact solve, its gradient, and training on state tracking.

A Mamba layer mixes time but not channels. FP-Mamba (arXiv 2503.10799) adds a channel mixer that
reads the layer's own output y, which makes the recurrence dense and y the fixed point of an
equation. Given y at t − 1, the equation of token t has one unknown number s. `find_root` solves
it, and `attach_gradient` gives s the gradient of the implicit function theorem.

    python examples/minimal.py    # learns the group S3 in about 40 seconds on two CPU cores

`lm/model` has the same layer with faster solvers, other mixers and language models around it.
tests/test_minimal.py compares the two, and docs/model.md has the equations.

Shape suffixes: b batch, l length, d inner channels, n states per channel.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

EPS = 1e-5


def find_root(alpha, beta, g0, g1, g2, delta) -> tuple[Tensor, Tensor]:
    """Solve s = φ(s) = (α + β s) / √(γ₀ + 2 γ₁ s + γ₂ s²) + δ, one equation per sequence.

    There may be three roots. The layer uses the one that fixed-point iteration from 0 reaches.

    Returns:
        The root s (b,) and the slope φ′(s) (b,).
    """
    s = torch.zeros_like(alpha)
    for _ in range(300):  # damped iteration, as in the paper, until near the root
        change = (alpha + beta * s) * (g0 + (2 * g1 + g2 * s) * s).rsqrt() + delta - s
        s = s + 0.99 * change
        if (change.abs() <= 1e-3 * (1 + s.abs())).all():
            break
    for _ in range(5):  # Newton's method: each step doubles the number of correct digits
        inverse_root = (g0 + (2 * g1 + g2 * s) * s).rsqrt()
        numerator = alpha + beta * s
        slope = beta * inverse_root - numerator * (g1 + g2 * s) * inverse_root**3
        s = s + (numerator * inverse_root + delta - s) / (1 - slope)
    return s, slope


def attach_gradient(root: Tensor, phi: Tensor, slope: Tensor) -> Tensor:
    """Return the root with the gradient ds = dφ / (1 − φ′) of the implicit function theorem."""
    factor = (1 / (1 - slope)).clamp(-20, 20)  # without a limit it is infinite where roots meet
    return root + factor * (phi - phi.detach())


class FPMamba(nn.Module):
    """FP-Mamba-1 with one Householder reflection Q = I − a u uᵀ as its mixer.

    In training a token reads y at t − 1 with noise, whose scale is at most `state_noise`.
    """

    def __init__(self, d_model: int, d_state: int = 16, state_noise: float = 0.0) -> None:
        super().__init__()
        self.d = d = 2 * d_model
        self.n, self.dt_rank, self.state_noise = d_state, math.ceil(d_model / 16), state_noise
        self.in_proj = nn.Linear(d_model, 2 * d, bias=False)
        self.x_proj = nn.Linear(d, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, d)
        dt = torch.exp(torch.empty(d).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_proj.bias.data = dt + torch.log(-torch.expm1(-dt))  # softplus(bias) = dt
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(d, 1))
        self.D = nn.Parameter(torch.ones(d))
        self.u_proj = weight_norm(nn.Linear(2 * d, d, bias=False))  # direction u of the reflection
        self.alpha_proj = weight_norm(nn.Linear(2 * d, 1))  # its strength a
        self.alpha_proj.bias.data.zero_()
        self.bc_y_proj = weight_norm(nn.Linear(d, 2 * d_state, bias=False))  # y's share of B, C
        self.z_y_proj = weight_norm(nn.Linear(d, d, bias=False))  # y's share of the gate
        self.out_norm = nn.LayerNorm(d)
        self.out_proj = nn.Linear(d, d_model, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden (b,l,d_model) to the layer's output (b,l,d_model)."""
        # 1. Compute everything that depends on the input only, for all tokens at once.
        x, z = self.in_proj(hidden).chunk(2, dim=-1)
        dt, bc_x = self.x_proj(x).split([self.dt_rank, 2 * self.n], dim=-1)
        dt = F.softplus(self.dt_proj(dt))  # (b,l,d)
        mixer_weight = torch.cat([self.u_proj.weight, self.alpha_proj.weight])
        mixer_weight_x, mixer_weight_y = mixer_weight.split(self.d, dim=1)
        rows_x = torch.cat([x @ mixer_weight_x.T, bc_x], dim=-1)  # (b,l,d+1+2n)
        weight_y = torch.cat([mixer_weight_y, self.bc_y_proj.weight])

        # 2. Run the recurrence: one exact solve per token.
        y, h = x.new_zeros(len(x), self.d), x.new_zeros(len(x), self.d, self.n)
        noise_scale = (self.state_noise if self.training else 0.0) * torch.rand(len(x), 1, 1)
        noise = noise_scale * torch.randn_like(x) * self.out_norm.weight
        ys = []
        for t in range(x.shape[1]):
            rows = rows_x[:, t] + (y + noise[:, t]) @ weight_y.T
            y, h = self.solve_token(rows, x[:, t], dt[:, t], h)
            ys.append(y)
        y = torch.stack(ys, dim=1)  # (b,l,d)

        # 3. Apply the output gate, which reads x and y at t − 1, and project.
        return self.out_proj(F.silu(z + self.z_y_proj(F.pad(y, (0, 0, 1, -1)))) * y)

    def solve_token(self, rows: Tensor, x: Tensor, dt: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Solve y = LayerNorm(history + gain ⊙ (Q x + (I − Q) y)) with Q = I − a u uᵀ.

        Args:
            rows: Values of u, a, B and C before their nonlinearities, (b,d+1+2n).
            x: Input of this token, (b,d).
            dt: Step sizes, (b,d).
            h: State after token t − 1, (b,d,n).

        Returns:
            y (b,d) and the state after this token (b,d,n).
        """
        u, a, B, C = rows.split([self.d, 1, self.n, self.n], dim=-1)
        u, B, C = (F.normalize(v, dim=-1, eps=EPS) for v in (F.silu(u), B, C))
        a = 2 * torch.sigmoid(a + self.alpha_proj.bias)
        h = torch.exp(dt.unsqueeze(-1) * -self.A_log.exp()) * h
        history = (h @ C.unsqueeze(-1)).squeeze(-1)
        gain = dt * (B * C).sum(-1, keepdim=True) + self.D
        qx = x - a * (u * x).sum(-1, keepdim=True) * u

        # With s = u·y the equation is y = LayerNorm(c + s m). Its product with u is s = φ(s).
        c, m = history + gain * qx, gain * a * u
        c0, m0 = c - c.mean(-1, keepdim=True), m - m.mean(-1, keepdim=True)  # centered
        wu = self.out_norm.weight * u
        alpha, beta, delta = (wu * c0).sum(-1), (wu * m0).sum(-1), u @ self.out_norm.bias
        g0, g1, g2 = c0.square().mean(-1) + EPS, (c0 * m0).mean(-1), m0.square().mean(-1)
        with torch.no_grad():
            root, slope = find_root(alpha, beta, g0, g1, g2, delta)
        phi = (alpha + beta * root) * (g0 + (2 * g1 + g2 * root) * root).rsqrt() + delta
        s = attach_gradient(root, phi, slope).unsqueeze(-1)

        y = self.out_norm(c + s * m)
        x_mixed = qx + a * s * u  # Q x + (I − Q) y
        return y, h + (dt * x_mixed).unsqueeze(-1) * B.unsqueeze(1)


class Model(nn.Module):
    """Language model with one FP-Mamba layer; the head shares the embedding's weights."""

    def __init__(self, vocab_size: int, d_model: int, state_noise: float = 0.0) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embeddings.weight, std=0.02)
        self.norm = nn.RMSNorm(d_model, eps=EPS)
        self.block = FPMamba(d_model, state_noise=state_noise)
        self.norm_f = nn.RMSNorm(d_model, eps=EPS)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (b,l) to logits (b,l,vocab_size)."""
        residual = self.embeddings(ids)
        return self.norm_f(residual + self.block(self.norm(residual))) @ self.embeddings.weight.T


def draw_s3(batch_size: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw elements of S3 (b,l), the permutations of three things, and their running products."""
    elements = list(itertools.permutations(range(3)))
    table = [[elements.index(tuple(p[i] for i in q)) for q in elements] for p in elements]
    table, ids = torch.tensor(table), torch.randint(6, (batch_size, length))
    products = itertools.accumulate(ids.unbind(1), lambda product, element: table[product, element])
    return ids, torch.stack(list(products), dim=1)


def train(steps: int = 600, lr: float = 4e-3, seed: int = 0) -> Model:
    """Train on S3, from sequences of three elements to sequences of sixteen."""
    torch.manual_seed(seed)
    model, length = Model(vocab_size=6, d_model=64, state_noise=0.3), 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.05)
    for step in range(1, steps + 1):
        ids, products = draw_s3(128, length)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), products.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        correct = (logits.argmax(-1) == products).all(1).float().mean()
        if step % 50 == 0:
            print(f"step {step}  length {length}  loss {loss:.4f}", flush=True)
        if correct >= 0.9 and length < 16:
            length += 1
    return model.eval()


@torch.no_grad()
def measure_accuracy(model: Model, length: int) -> float:
    """Return the share of 500 sequences with every product right."""
    ids, products = draw_s3(500, length)
    return (model(ids).argmax(-1) == products).all(1).float().mean().item()


if __name__ == "__main__":
    trained = train()
    for test_length in (16, 64, 256, 1024):
        print(f"length {test_length}: {measure_accuracy(trained, test_length):.3f} correct")
