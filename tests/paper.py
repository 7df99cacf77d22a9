"""Modules that hold what the paper's code holds, under its names and in its shapes, and compute
nothing: a checkpoint of any configuration, without the paper's code.

The names are those of ../shared/golden; weight normalisation and the orthogonal matrix are torch's
own, so that their names and shapes are what torch writes.
"""

import math

import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

DEFAULTS = dict(
    d_conv=4, expand=2, headdim=64, ngroups=1, bias=False, glu_in_loop=False,
    use_short_conv=False, mixer_rank=1, mixer_proj_rank=-1, symm_mixer=False, mixer_h_dep=True,
)  # fmt: skip


def normed(n_in, n_out, bias=False):
    return weight_norm(nn.Linear(n_in, n_out, bias=bias))


def low_rank(n_in, n_out, rank):
    if rank == -1:
        return normed(n_in, n_out)
    return nn.Sequential(normed(n_in, rank), normed(rank, n_out))


def triangle(m):
    return m * (m + 1) // 2


class Mixer(nn.Module):
    def __init__(self, kind, n_in, d, rank, proj_rank):
        super().__init__()
        if kind in ("householderproduct", "dplr"):
            self.u_proj = low_rank(n_in, rank * d, proj_rank)
            self.alpha_proj = normed(n_in, rank, bias=True)
        elif kind == "kronecker":
            m1 = next(m for m in range(math.isqrt(d), 0, -1) if d % m == 0)
            m2 = d // m1
            self.uv_project = normed(n_in, triangle(m1) + triangle(m2))
            self.diag = normed(n_in, m1 + m2, bias=True)
        elif kind == "monarch":
            self.uv_project = normed(n_in, d // rank * triangle(rank))
            self.alpha = normed(n_in, d // rank, bias=True)
        elif kind == "nonselective":
            self.q_proj = orthogonal(nn.Linear(d, d, bias=False))
        elif kind == "selectivedense":
            self.proj = normed(n_in, triangle(d))
        else:
            assert kind == "mixture"
            kinds = ["householderproduct", "kronecker"] * rank
            self.mixers = nn.ModuleList(Mixer(k, n_in, d, 1, proj_rank) for k in kinds[:rank])


class Layer(nn.Module):
    """What the three layers share. c: the configuration, complete."""

    def __init__(self, c, d):
        super().__init__()
        n_in = d if c["symm_mixer"] or not c["mixer_h_dep"] else 2 * d
        self.mixer = Mixer(c["mixer_type"], n_in, d, c["mixer_rank"], c["mixer_proj_rank"])

    def convolution(self, d, width):
        return nn.Conv1d(d, d, width, groups=d, padding=width - 1)


class FPMamba(Layer):
    def __init__(self, c):
        d, n, d_model = c["expand"] * c["d_model"], c.get("d_state", 16), c["d_model"]
        super().__init__({"mixer_type": "kronecker", **c}, d)
        rank = math.ceil(d_model / 16)
        self.in_proj = nn.Linear(d_model, 2 * d, bias=c["bias"])
        if c["use_short_conv"]:
            self.conv1d = self.convolution(d, c["d_conv"])
        self.bc_y_proj = normed(d, 2 * n)
        if not c["glu_in_loop"]:
            self.z_y_proj = normed(d, d)
        self.x_proj = nn.Linear(d, rank + 2 * n, bias=False)
        self.dt_proj = nn.Linear(rank, d)
        self.A_log, self.D = nn.Parameter(torch.empty(d, n)), nn.Parameter(torch.empty(d))
        self.out_norm = nn.LayerNorm(d)
        self.out_proj = nn.Linear(d, d_model, bias=c["bias"])


class FPMamba2(Layer):
    def __init__(self, c):
        d, d_model = c["expand"] * c["d_model"], c["d_model"]
        super().__init__({"mixer_type": "kronecker", **c}, d)
        heads, bc = d // c["headdim"], 2 * c["ngroups"] * c.get("d_state", 128)
        self.in_proj = nn.Linear(d_model, 2 * d + bc + heads, bias=c["bias"])
        if c["use_short_conv"]:
            self.conv1d = self.convolution(d + bc, c["d_conv"])
        self.bc_y_proj, self.z_y_proj = normed(d, bc), normed(d, d)
        for name in ("dt_bias", "A_log", "D"):
            setattr(self, name, nn.Parameter(torch.empty(heads)))
        self.norm = nn.RMSNorm(d)
        self.out_proj = nn.Linear(d, d_model, bias=c["bias"])


class FPRNN(Layer):
    def __init__(self, c):
        wide = c.get("mixer_type") == "selectivedense"
        d, d_model = 256 if wide else c["expand"] * c["d_model"], c["d_model"]
        super().__init__({"mixer_type": "householderproduct", **c}, d)
        self.lambda_proj = nn.Linear(d, d)
        if c["use_short_conv"]:
            for name in ("x", "b", "mixer", "lambda"):
                setattr(self, f"conv1d_{name}", self.convolution(d, c["d_conv"]))
            self.conv1d_c = self.convolution(2 * d, c["d_conv"])
        self.b_proj = nn.Linear(d, d, bias=False)
        self.c_proj = nn.Linear(2 * d, d, bias=False)
        self.input_trans = nn.Linear(d_model, 2 * d, bias=c["bias"])
        self.output_trans = nn.Linear(d, d_model, bias=c["bias"])
        self.output_norm = nn.RMSNorm(d)


LAYERS = {"FPMamba": FPMamba, "FPMamba1": FPMamba, "FPMamba2": FPMamba2, "FPRNN": FPRNN}


class LanguageModel(nn.Module):
    def __init__(self, model, ssm):
        super().__init__()
        d_model, vocabulary = model["d_model"], -(-model["vocab_size"] // 8) * 8
        norm = nn.RMSNorm if model.get("rms_norm", True) else nn.LayerNorm
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Embedding(vocabulary, d_model)
        self.backbone.layers = nn.ModuleList()
        for _ in range(model["n_layer"]):
            layer = nn.Module()
            layer.mixer = LAYERS[ssm["layer"]]({**DEFAULTS, "d_model": d_model, **ssm})
            layer.norm = norm(d_model)
            self.backbone.layers.append(layer)
        self.backbone.norm_f = norm(d_model)
        self.lm_head = nn.Linear(d_model, vocabulary, bias=False)
        if model.get("tie_embeddings", True):
            self.lm_head.weight = self.backbone.embedding.weight


def checkpoint(description, seed=0):
    """{the paper's name: tensor, fp64} of a description (see `reference_config`), such that nothing
    is trivial and every iteration contracts."""
    torch.manual_seed(seed)
    if "cls" in description:
        module = LAYERS[description["cls"]]({**DEFAULTS, **description["config"]})
    else:
        module = LanguageModel(description["model_config"], description["ssm_cfg"])
    module = module.double()
    state = {}
    for name, tensor in module.state_dict().items():
        *_, owner, leaf = f"..{name}".split(".")
        if name.endswith("weight.0.base"):
            drawn = torch.eye(len(tensor)).to(tensor)  # Q near I: the iteration contracts
        elif leaf == "original":
            drawn = 0.05 * torch.randn_like(tensor)
        elif leaf in ("D", "original0") or ("norm" in owner and leaf == "weight"):
            drawn = 0.1 + 0.2 * torch.rand_like(tensor)
        else:
            drawn = 0.4 * torch.randn_like(tensor)
        if "alpha" in name and leaf == "bias":
            drawn = drawn - 1
        state[name] = drawn
    if "lm_head.weight" in state and description["model_config"].get("tie_embeddings", True):
        state["lm_head.weight"] = state["backbone.embedding.weight"]
    return state
