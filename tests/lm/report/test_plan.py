"""Planned costs of a run, compared with real models and with counted matrix products."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm.common.cards import SEQUENCE_S, TOKEN_S
from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config.data import Data, Stage
from lm.config.model import Model
from lm.config.schema import Config
from lm.report import estimate
from lm.report.plan import TOKEN_BY_TOKEN, make_table, parse_hardware, plan
from lm.training.build import build_model

ROOT = Path(__file__).parents[3]
LM = ROOT / "configs/lm"
A100 = parse_hardware(4, "a100-80g")
H200 = parse_hardware(1, "h200")


def tiny_config(solver=None, **model) -> Config:
    sizes = {"d_model": 16, "n_layer": 2, "d_state": 4, "vocab_size": 64, **model}
    train = {"micro_batch_size": 3, "grad_accum_steps": 2, "steps": 7}
    return Config(model=sizes, solver=solver or {}, train=train, data={"seq_len": 32})


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"mixer": "kronecker"},
        {"mixer": "dplr", "mixer_rank": 3, "mixer_proj_rank": 2},
        {"glu_in_loop": True, "use_short_conv": True, "tie_embeddings": False},
        {"name": "mamba"},
        {"name": "mamba", "tie_embeddings": False},
    ],
    ids=str,
)
def test_planned_parameters_equal_those_of_the_model(model):
    cfg = tiny_config(**model)
    real = build_model(cfg, 64)
    costs = plan(cfg, 1)
    assert costs["parameters"] == sum(w.numel() for w in real.parameters())
    assert costs["parameters_without_embedding"] == costs["parameters"] - 64 * 16


def test_sequences_and_tokens_per_step():
    costs = plan(tiny_config(), 4)
    assert costs["sequences_per_step"] == 3 * 2 * 4
    assert costs["tokens_per_step"] == 3 * 2 * 4 * 32
    assert costs["tokens"] == 3 * 2 * 4 * 32 * 7


def test_vocabulary_is_the_tokenizers_or_must_be_set():
    auto = Config(model={"d_model": 16, "n_layer": 1}, tokenizer={"vocab_size": 301})
    assert plan(auto, 1)["vocab_size"] == 304
    with pytest.raises(ConfigError, match=r"set model\.vocab_size \(50264 for gpt2\)"):
        plan(Config(tokenizer={"name": "gpt2"}), 1)


# FLOPs.


def count_flops(call) -> int:
    """Return the FLOPs of the matrix products in a call, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def wide_config(**model) -> Config:
    """Return a model so wide that products dominate; its solve always runs `max_iters` times."""
    solver = {"token": "iterate", "schedule": "parallel", "stopping": "paper"}
    solver |= {"max_iters": 3, "tol": 1e-12}
    return tiny_config(solver, **{"d_model": 256, "n_layer": 1, **model})


@pytest.mark.parametrize("rank", [1, 2])
def test_flops_of_a_householder_block_match_its_products(rank):
    block = build_model(wide_config(mixer_rank=rank), 64).backbone.layers[0].block
    tokens, d_inner, d_state, d_model, dt_rank = 12, 512, 4, 256, 16
    u = torch.randn(2, tokens // 2, d_model)
    fixed_flops, evaluation_flops = block.flops_per_token()
    with torch.no_grad():
        static = block.prepare(u)
        y = torch.randn_like(static.x)
        # 1. One evaluation: projections of y to the mixer, B and C.
        counted = count_flops(lambda: block.step(static, y)) / tokens
        mixer_size = rank * (1 + d_inner)  # gates and vectors
        by_hand = 2 * d_inner * (mixer_size + 2 * d_state)
        assert counted == pytest.approx(by_hand, rel=0.02)
        assert evaluation_flops == pytest.approx(by_hand, rel=0.25) and evaluation_flops > by_hand
        # 2. The rest of the block: projections of the input, the gate's y part and out_proj.
        counted = (
            count_flops(lambda: (block.prepare(u), block.gate_and_project(static, y))) / tokens
        )
        by_hand = 2 * d_model * 2 * d_inner
        by_hand += 2 * d_inner * (dt_rank + 2 * d_state + dt_rank + mixer_size)
        by_hand += 2 * (d_inner * d_inner + d_inner * d_model)
        assert counted == pytest.approx(by_hand, rel=0.02)
        assert fixed_flops == pytest.approx(by_hand, rel=0.25)


@pytest.mark.parametrize("glu_in_loop", [False, True])
def test_flops_of_a_model_match_one_training_step(glu_in_loop):
    cfg = wide_config(n_layer=2, glu_in_loop=glu_in_loop, vocab_size=512)
    model = build_model(cfg, 512).train()
    ids = torch.randint(0, 512, (2, 16))

    def train():
        output = model(input_ids=ids, labels=ids)
        assert (output.fixed_point.evaluations == 3).all()
        output.loss.backward()

    assert model.flops_per_token(3) == pytest.approx(count_flops(train) / ids.numel(), rel=0.25)


# Memory.


def plan_memory(cfg: Config, ranks: int = 1, gpu: str = "a100-80g"):
    return plan(cfg, parse_hardware(ranks, gpu))["memory"]


def test_memory_falls_with_the_zero_stage():
    cfg = tiny_config()
    cfg.engine.deepspeed = {"zero_optimization": {"reduce_bucket_size": 1000}}
    costs = plan(cfg, parse_hardware(4, "a100-80g"))
    n, stages = costs["parameters"], costs["memory_by_stage"]
    assert stages[1] == costs["memory"]  # the default
    assert stages[0].weights == 4 * n and stages[0].optimizer == 8 * n and stages[0].master == 0
    assert stages[1].optimizer == 8 * n / 4 and stages[1].master == n
    assert stages[1].gradients == 4 * n
    assert stages[2].gradients == 4 * n / 4 and stages[2].weights == 4 * n
    assert stages[3].weights == 4 * n / 4
    sums = [m.weights + m.master + m.gradients + m.optimizer for m in stages.values()]
    assert sums == sorted(set(sums), reverse=True)  # each stage needs less than the one before


def test_deepspeed_buffers_follow_its_configuration():
    cfg = tiny_config()
    costs = plan(cfg, parse_hardware(4, "a100-80g"))
    buffers = {s: m.buffers for s, m in costs["memory_by_stage"].items()}
    n = costs["parameters"]
    # ZeRO-1 and 2 fill one buffer while the other is sent.
    assert buffers == {0: 0, 1: 2 * 4 * n, 2: 2 * 4 * n, 3: 4 * n + 4 * n}
    assert plan_memory(cfg, 1).buffers == 4 * n  # one rank sends nothing
    cfg.engine.deepspeed = {"zero_optimization": {"reduce_bucket_size": 1000}}
    for cfg.train.precision in ("fp32", "bf16"):
        assert plan_memory(cfg, 4).buffers == 2 * 4 * 1000
    cfg.engine.deepspeed["zero_optimization"]["overlap_comm"] = False
    assert plan_memory(cfg, 4).buffers == 4 * 1000


def test_memory_uses_the_stage_in_the_deepspeed_json():
    by_key, by_json = tiny_config(), tiny_config()
    by_key.engine.zero_stage = 3
    by_json.engine.deepspeed = {"zero_optimization": {"stage": 3}}
    costs = plan(by_json, 4)
    assert costs["memory"] == plan(by_key, 4)["memory"]
    assert costs["memory_by_stage"] == plan(by_key, 4)["memory_by_stage"]
    assert make_rows(costs, by_json)["memory per GPU, ZeRO-3"].endswith("fits, as configured")


def test_activations_grow_with_the_batch_and_shrink_with_checkpointing():
    cfg = tiny_config(n_layer=8)
    before = plan_memory(cfg).activations
    cfg.train.micro_batch_size *= 2
    assert 1.3 * before < plan_memory(cfg).activations <= 2 * before
    cfg.train.micro_batch_size //= 2
    cfg.model.gradient_checkpointing = True
    assert plan_memory(cfg).activations < before / 2


# On a GPU or not, precision, bytes per token and channel of the tensors that autograd saved for a
# layer (counted once with d_model 256, d_state 16 and 8 × 1,024 tokens), and settings of model and
# solver. The formula must agree up to 26 %.
COUNTED = [
    (True, "bf16", 113.2, {}, {}),
    (False, "fp32", 56.5, {}, {}),
    (True, "bf16", 250.2, {"mixer_rank": 4}, {}),
    (False, "bf16", 56.6, {"mixer_rank": 4}, {}),
    (True, "bf16", 193.3, {"mixer": "kronecker"}, {}),
    (True, "bf16", 119.3, {"block": "fp_mamba2", "headdim": 64}, {}),
    (True, "bf16", 60.0, {}, {"gradient": "one_step"}),
    (False, "fp32", 57.4, {"layers": "mamba"}, {}),
    (True, "bf16", 73.1, {"layers": "mamba2", "headdim": 64}, {}),
    (True, "bf16", 13.2, {"layers": "attention", "headdim": 64}, {}),
    (True, "bf16", 17.3, {"layers": "mlp"}, {}),
    (True, "bf16", 158.3, {"layers": "gated_deltaproduct", "headdim": 64}, {}),
]


@pytest.mark.parametrize("on_gpu, precision, counted, model, solver", COUNTED, ids=str)
def test_saved_floats_match_counted_activations(on_gpu, precision, counted, model, solver):
    cfg = tiny_config(solver, **{"d_model": 256, "d_state": 16, **model})
    first, *_ = estimate.count_saved_floats(cfg, on_gpu)
    in_bytes = 4 * first * (estimate.BF16_FACTOR if precision == "bf16" else 1)
    assert in_bytes == pytest.approx(counted, rel=0.26)


@pytest.mark.parametrize("kind", ["fp_mamba1", "lstm", "slstm", "m2rnn"])
def test_centroids_save_what_they_read_and_their_weights(kind):
    sizes = {"layers": kind, "n_layer": 1, "n_heads": 2, "headdim": 8}
    cfg, without = (tiny_config(**sizes, state_centroids=count) for count in (5, 0))
    vectors = build_model(cfg, 64).backbone.layers[0].block.centroids.vectors
    (saved,), (base,) = (estimate.count_saved_floats(c, False) for c in (cfg, without))
    assert (saved - base) * cfg.model.expand * 16 == pytest.approx(vectors.shape[1] + 5)


def test_memory_formula_by_hand():
    """ZeRO-1 on two CPU ranks in fp32; the logits of at most 4,096 tokens exist at a time."""
    cfg = tiny_config(n_layer=2)
    costs = plan(cfg, parse_hardware(2, "cpu"))
    n, m, tokens = costs["parameters"], costs["memory"], 3 * 32
    assert (m.weights, m.gradients, m.master, m.optimizer) == (4 * n, 4 * n, 2 * n, 4 * n)
    # 2 layers, 14 floats of 4 bytes, d_inner 32; embedding and norm of d_model 16.
    assert m.activations == 2 * 14 * 4 * 32 * tokens + 8 * 16 * tokens
    assert m.working == 0.25 * 14 * 4 * 32 * tokens
    assert m.loss == 12 * 64 * tokens and m.runtime == 0
    assert m.total == pytest.approx(14 * n + 4 * n + m.activations + max(m.working, m.loss))
    cfg.train.micro_batch_size = 1000
    assert plan(cfg, parse_hardware(2, "cpu"))["memory"].loss == 12 * 64 * 4096


# Limits, time.


def load_paper_config(*overrides: str) -> Config:
    return config.load(LM / "fpmamba_160m_fineweb2b_paper.yaml", overrides)


def test_plan_that_does_not_fit_gives_advice():
    cfg = load_paper_config("train.micro_batch_size=16")
    costs = plan(cfg, parse_hardware(4, "a100-40g"))
    assert not costs["fits"]
    assert make_rows(costs, cfg)["to make it fit"].startswith("a smaller train.micro_batch_size")
    smaller = load_paper_config("train.micro_batch_size=8")
    smaller_costs = plan(smaller, parse_hardware(4, "a100-40g"))
    assert smaller_costs["fits"]
    assert smaller_costs["tokens_per_step"] == costs["tokens_per_step"]
    assert "to make it fit" not in make_rows(smaller_costs, smaller)


def test_hours_are_flops_over_the_gpus_rate():
    cfg = config.load(LM / "mamba_160m_fineweb2b.yaml")
    costs = plan(cfg, parse_hardware(4, "a100-80g", utilisation=0.5))
    model = estimate.build_meta_model(cfg, 50264)
    flops = model.flops_per_token(1, length=2048) * costs["tokens"]
    assert costs["hours"]["matrix products"] == pytest.approx(flops / (4 * 312e12 * 0.5) / 3600)
    assert costs["hours"]["sequential kernel"] == 0 and costs["evaluations"] is None
    rows = make_rows(costs, cfg)
    assert rows["hours"] == f"{sum(costs['hours'].values()):,.2f}"
    assert rows["… matrix products"].endswith("at 50% of 312 TFLOP/s (--utilisation)")
    assert "… sequential kernel" not in rows


def test_sequential_kernel_time_is_independent_of_flops():
    cfg = config.load(LM / "fpmamba_160m_fineweb2b.yaml")
    costs = plan(cfg, A100)
    micro_batches = cfg.train.steps * cfg.train.accumulation(4)
    seconds_per_position = TOKEN_S + SEQUENCE_S * cfg.train.micro_batch_size
    seconds = cfg.model.n_layer * cfg.data.seq_len * micro_batches * seconds_per_position
    assert costs["hours"]["sequential kernel"] == pytest.approx(seconds / 3600)
    assert costs["evaluations"] == 1
    faster = plan(cfg, parse_hardware(4, "a100-80g", utilisation=0.5))["hours"]
    assert faster["sequential kernel"] == costs["hours"]["sequential kernel"]
    assert faster["matrix products"] == pytest.approx(costs["hours"]["matrix products"] / 2)


@pytest.mark.parametrize(
    "solver, model, hardware, kernel_layers",
    [
        ({}, {}, H200, 2),
        ({}, {"layers": "mamba fp_mamba1"}, H200, 1),
        ({}, {"mixer": "kronecker", "layers": [{"fp_mamba1": {"mixer": "dplr"}}]}, H200, 2),
        ({}, {"mixer": "kronecker"}, H200, None),
        ({}, {"d_model": 16_384, "mixer_rank": 4}, H200, None),  # more than a kernel holds
        ({}, {"layers": ["fp_mamba1", {"fp_mamba1": {"dt_h_dep": True}}]}, H200, None),
        ({"schedule": "sequential"}, {"mixer": "kronecker"}, H200, None),
        ({"schedule": "parallel"}, {}, H200, None),
        ({"token": "iterate", "stopping": "paper"}, {}, H200, None),
        ({}, {}, parse_hardware(1, "cpu"), None),
    ],
    ids=str,
)
def test_hours_are_known_only_with_a_measured_rate(solver, model, hardware, kernel_layers):
    cfg = tiny_config(solver, **model)
    costs = plan(cfg, hardware)
    assert (costs["hours"] is None) == (kernel_layers is None)
    if kernel_layers is None:
        assert make_rows(costs, cfg)["hours"].startswith("unknown ")
        assert make_rows(costs, cfg)["hours"].endswith("train a few updates, which logs tokens/s")
    else:
        assert len(costs["layers"].kernel) == kernel_layers
        assert costs["hours"]["sequential kernel"] > 0


def test_evaluations_are_one_for_sequential_solves():
    assert plan(tiny_config(), parse_hardware(1, "cpu"))["evaluations"] == 1
    assert plan(tiny_config(mixer="kronecker"), H200)["evaluations"] == 10  # in windows
    hybrid = tiny_config(layers=["fp_mamba1", {"fp_mamba1": {"dt_h_dep": True}}])
    assert plan(hybrid, H200)["evaluations"] == 5.5
    assert plan(tiny_config(name="mamba"), H200)["evaluations"] is None


def test_utilisation_above_one_is_refused():
    with pytest.raises(ConfigError, match="--utilisation is 25: it must be a share of the GPU's"):
        parse_hardware(4, utilisation=25.0)


# Shipped configurations.


def test_papers_model_is_planned_on_the_meta_device(monkeypatch):
    built = []

    def record(cfg, vocab_size, *rest):
        model = build_model(cfg, vocab_size, *rest)
        built.append(({str(w.device) for w in model.parameters()}, cfg.model.n_layer))
        return model

    monkeypatch.setattr(estimate, "build_model", record)
    cfg = load_paper_config()
    costs = plan(cfg, 4)
    assert built == [({"meta"}, 12)]
    assert costs["sequences_per_step"] == 256
    assert costs["tokens"] == 4800 * 256 * 2048
    assert 160e6 < costs["parameters"] < 175e6
    assert 10 * 2**30 < costs["memory"].total < 80 * 2**30


def count_planned_parameters(name: str) -> int:
    cfg = config.load(LM / f"{name}_fineweb2b.yaml")
    return plan(cfg, 4)["parameters"]


def test_parameters_of_the_baselines():
    names = ("fpmamba_160m", "mamba_160m", "mamba_169m")
    fp_mamba, same_layers, same_size = map(count_planned_parameters, names)
    assert same_layers / fp_mamba == pytest.approx(0.5, abs=0.005)
    assert same_size == pytest.approx(fp_mamba, rel=0.02)
    for name in names:
        comment = (LM / f"{name}_fineweb2b.yaml").read_text().partition("name:")[0]
        assert f"{count_planned_parameters(name) / 1e6:.1f} M" in comment


def make_rows(costs: dict, cfg: Config) -> dict[str, str]:
    """Return the cells of the table by the label of their row."""
    table = make_table(costs, cfg)
    return dict(zip(*(list(column.cells) for column in table.columns)))


@pytest.mark.parametrize("until, passes", [(None, 14), (3, 11), (9, 7)])
def test_adversarial_update_has_two_passes(until, passes):
    """Of 7 updates, those after the curriculum's end (`until`, or 0) are adversarial."""
    cfg = tiny_config()
    one_pass = plan(cfg, H200)
    cfg.train.adversarial_noise = 0.1
    if until:
        data = cfg.data.model_copy(update={"curriculum": [Stage(until=until, weights={})]})
        cfg = cfg.model_copy(update={"data": data})
    costs = plan(cfg, H200)
    assert costs["tokens"] == one_pass["tokens"]
    assert costs["flops"] == pytest.approx(one_pass["flops"] * passes / 7)
    for part, hours in costs["hours"].items():
        assert hours == pytest.approx(one_pass["hours"][part] * passes / 7)
    assert f"with two passes in {passes - 7} updates" in make_rows(costs, cfg)["hours"]
    assert "two passes" not in make_rows(one_pass, tiny_config())["hours"]


def test_waiting_stage_makes_the_passes_a_minimum():
    mixture = {"words": {"source": "traces", "weight": 1}}
    stage = {"until": 3, "min_answer_prob": 0.9, "weights": {"words": 1}}
    data = {"seq_len": 32, "mixture": mixture, "curriculum": [stage]}
    cfg = tiny_config().model_copy(update={"data": Data(**data)})
    cfg.train.adversarial_noise = 0.1
    assert "two passes in at least 4 updates" in make_rows(plan(cfg, H200), cfg)["hours"]


@pytest.mark.parametrize("name", get_args(Model.model_fields["name"].annotation))
def test_every_model_can_be_planned(name):
    costs = plan(tiny_config(name=name, d_model=64, headdim=16), 2)
    assert costs["parameters"] > 0 and costs["flops_per_token"] > 0
    assert all(size >= 0 for size in costs["memory"])
    if name in TOKEN_BY_TOKEN:
        assert costs["hours"] is None
    else:
        assert costs["hours"]["matrix products"] > 0


def test_gpu_can_be_described_by_its_data_sheet():
    card = parse_hardware(2, "b200:2250:178").card
    assert card.name == "b200" and card.memory == 178 * 2**30
    assert card.peak == {"bf16": 2250e12, "fp32": 2250e12}
    costs = plan(tiny_config(), parse_hardware(2, "b200:2250:178"))
    assert "2 × b200" in make_rows(costs, tiny_config())["ranks (GPUs)"]
    for wrong in ("b200:2250:178:8", "b200:0:178", "b200:x:178", ":1:1", "b200:inf:1"):
        with pytest.raises(ConfigError, match=f"--gpu {wrong}: .* NAME:TFLOPS:GIB,"):
            parse_hardware(2, wrong)
    with pytest.raises(ConfigError, match="Describe any other card by its data sheet: NAME:TFLOPS"):
        parse_hardware(2, "b200")
