"""Mamba and Mamba-2 language models once more, token by token in fp64, from the papers' equations.

They read weights under the names of transformers and of state-spaces and share no code with lm/.
"""

import torch
import torch.nn.functional as F


def logits(state, ids, kind, **sizes):
    """A language model's logits (b,l,vocabulary).

    Args:
        state: {name: tensor} of transformers' or state-spaces' format. ids: (b,l). kind: "mamba" or
        "mamba2". sizes: of the layer: n; of mamba r (rank of Δ), of mamba2 p (width of a head).
    """
    w = {name.replace(".embedding.", ".embeddings."): t.double() for name, t in state.items()}
    hidden = w["backbone.embeddings.weight"][ids]
    layer, index = {"mamba": mamba, "mamba2": mamba2}[kind], 0
    while f"backbone.layers.{index}.norm.weight" in w:
        prefix = f"backbone.layers.{index}."
        own = {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}
        own = {name[6:]: t for name, t in own.items() if name.startswith("mixer.")}
        hidden = hidden + layer(own, normed(w, f"{prefix}norm", hidden), **sizes)
        index += 1
    hidden = normed(w, "backbone.norm_f", hidden)
    return hidden @ w.get("lm_head.weight", w["backbone.embeddings.weight"]).T


def normed(w, name, x):
    """RMSNorm, or LayerNorm where there is a bias."""
    if f"{name}.bias" not in w:
        return rms(x, w[f"{name}.weight"])
    centred = x - x.mean(-1, keepdim=True)
    return rms(centred, w[f"{name}.weight"]) + w[f"{name}.bias"]


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def convolved(w, x):
    """silu of the causal convolution of x (b,l,d)."""
    kernel = w["conv1d.weight"][:, 0]  # (d,k), the last of which is of the token itself
    width = kernel.shape[1]
    out = w.get("conv1d.bias", torch.zeros(1)).double() * torch.ones_like(x)
    for back in range(min(width, x.shape[1])):
        out[:, back:] += kernel[:, width - 1 - back] * x[:, : x.shape[1] - back]
    return F.silu(out)


def linear(w, name, x):
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def mamba(w, u, n, r):
    x, z = linear(w, "in_proj", u).chunk(2, -1)
    x = convolved(w, x)
    delta, B, C = linear(w, "x_proj", x).split([r, n, n], -1)
    dt = (1 + linear(w, "dt_proj", delta).exp()).log()  # softplus
    A, h, out = -w["A_log"].exp(), 0.0, []
    for t in range(u.shape[1]):
        h = (dt[:, t, :, None] * A).exp() * h
        h = h + (dt[:, t] * x[:, t])[:, :, None] * B[:, t, None, :]
        y = (h * C[:, t, None, :]).sum(-1) + w["D"] * x[:, t]
        out.append(y * F.silu(z[:, t]))
    return linear(w, "out_proj", torch.stack(out, 1))


def mamba2(w, u, n, p):
    heads = len(w["A_log"])
    d = heads * p
    z, xbc, delta = linear(w, "in_proj", u).split([d, d + 2 * n, heads], -1)
    x, B, C = convolved(w, xbc).split([d, n, n], -1)
    dt = (1 + (delta + w["dt_bias"]).exp()).log()
    A, S, out = -w["A_log"].exp(), 0.0, []
    for t in range(u.shape[1]):
        x_t = x[:, t].unflatten(-1, (heads, p))
        S = (dt[:, t] * A).exp()[:, :, None, None] * S
        S = S + (dt[:, t, :, None] * x_t)[..., None] * B[:, t, None, None, :]
        y = (S * C[:, t, None, None, :]).sum(-1) + w["D"][:, None] * x_t
        out.append(rms(y.flatten(1) * F.silu(z[:, t]), w["norm.weight"]))
    return linear(w, "out_proj", torch.stack(out, 1))
