"""The cost of a run before it starts, against real models and a count of their products."""

import io
import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm.common.cards import CARDS
from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config.data import Data, Stage
from lm.config.model import Model
from lm.config.schema import Config, Tokenizer
from lm.report import estimate
from lm.report.estimate import Sizes, communication
from lm.report.measure import measure
from lm.report.plan import _link, describe, plan, where
from lm.report.slow import warn_if_slow
from lm.training.build import build_model

ROOT = Path(__file__).parents[3]
LM = ROOT / "configs/lm"


def tiny(solver=None, **model) -> Config:
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
def test_parameters_are_those_of_a_real_model(model):
    cfg = tiny(**model)
    real = build_model(cfg, 64)
    p = plan(cfg, 1)
    assert p["parameters"] == sum(w.numel() for w in real.parameters())
    assert p["parameters_without_embedding"] == p["parameters"] - 64 * 16


def test_sequences_and_tokens():
    p = plan(tiny(), 4)
    assert p["sequences_per_step"] == 3 * 2 * 4
    assert p["tokens_per_step"] == 3 * 2 * 4 * 32
    assert p["tokens"] == 3 * 2 * 4 * 32 * 7


def test_the_vocabulary_is_the_tokenizers_or_must_be_given():
    auto = Config(model={"d_model": 16, "n_layer": 1}, tokenizer={"vocab_size": 301})
    assert plan(auto, 1)["vocab_size"] == 304
    with pytest.raises(ConfigError, match=r"set model\.vocab_size \(50264 for gpt2\)"):
        plan(Config(tokenizer={"name": "gpt2"}), 1)


# FLOPs.


def test_flops_are_linear_in_the_evaluations():
    flops = plan(tiny(), 1)["flops_per_token"]
    at = {int(name.removeprefix("evaluations = ")): value for name, value in flops.items()}
    assert sorted(at) == [1, 5, 10, 20]
    step = (at[20] - at[1]) / 19
    assert step > 0
    assert at[5] == pytest.approx(at[1] + 4 * step)
    assert at[10] == pytest.approx(at[1] + 9 * step)


def products(call) -> int:
    """FLOPs of the matrix products inside a call, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def wide(**model) -> Config:
    """Wide enough for products to dominate; the solve runs to `max_iters` exactly, all tokens."""
    solver = {"token": "iterate", "schedule": "parallel", "stopping": "paper"}
    solver |= {"max_iters": 3, "tol": 1e-12}
    return tiny(solver, **{"d_model": 256, "n_layer": 1, **model})


@pytest.mark.parametrize("rank", [1, 2])
def test_the_householder_blocks_formula_against_its_products(rank):
    block = build_model(wide(mixer_rank=rank), 64).backbone.layers[0].block
    tokens, d, n, d_model, dt_rank = 12, 512, 4, 256, 16
    u = torch.randn(2, tokens // 2, d_model)
    once, step = block.flops_per_token()
    with torch.no_grad():
        static = block.prepare(u)
        y = torch.randn_like(static.x)
        counted = products(lambda: block.step(static, y)) / tokens
        m = rank * (1 + d)  # the mixer's gates and vectors
        by_hand = 2 * d * (m + 2 * n)  # sh(y) → mixer, B and C
        assert counted == pytest.approx(by_hand, rel=0.02)  # the scan may hold small products
        assert step == pytest.approx(by_hand, rel=0.25) and step > by_hand
        around = products(lambda: (block.prepare(u), block.finish(static, y))) / tokens
        by_hand = 2 * (d_model * 2 * d + d * (dt_rank + 2 * n) + dt_rank * d + d * m)
        by_hand += 2 * (d * d + d * d_model)  # the gate's y part, and out_proj
        assert around == pytest.approx(by_hand, rel=0.02)
        assert once == pytest.approx(by_hand, rel=0.25)


@pytest.mark.parametrize("glu_in_loop", [False, True])
def test_the_models_formula_against_one_training_step(glu_in_loop):
    cfg = wide(n_layer=2, glu_in_loop=glu_in_loop, vocab_size=512)
    model = build_model(cfg, 512).train()
    ids = torch.randint(0, 512, (2, 16))

    def train():
        output = model(input_ids=ids, labels=ids)
        assert (output.fixed_point.evaluations == 3).all()
        output.loss.backward()

    assert model.flops_per_token(3) == pytest.approx(products(train) / ids.numel(), rel=0.25)


# Memory.


def needed(cfg: Config, ranks: int = 1, gpu: str = "a100-80g"):
    return plan(cfg, where(cfg, ranks, gpu))["memory"]


def test_memory_falls_with_the_zero_stage():
    cfg = tiny()
    cfg.engine.deepspeed = {"zero_optimization": {"reduce_bucket_size": 1000}}
    p = plan(cfg, where(cfg, 4, "a100-80g"))
    n, of = p["parameters"], p["stages"]
    assert of[1] == p["memory"]  # the default
    assert of[0].weights == 4 * n and of[0].optimizer == 8 * n and of[0].master == 0
    assert of[1].optimizer == 8 * n / 4 and of[1].master == n and of[1].gradients == 4 * n
    assert of[2].gradients == 4 * n / 4 and of[2].weights == 4 * n
    assert of[3].weights == 4 * n / 4
    still = [m.weights + m.master + m.gradients + m.optimizer for m in of.values()]
    assert still == sorted(still, reverse=True) and len(set(still)) == 4


def test_deepspeeds_buffers_are_those_of_its_json():
    cfg = tiny()
    planned = plan(cfg, where(cfg, 4, "a100-80g"))
    of = {s: m.buffers for s, m in planned["stages"].items()}
    n = planned["parameters"]
    # ZeRO-1 and 2 fill one buffer while the other is sent.
    assert of == {0: 0, 1: 2 * 4 * n, 2: 2 * 4 * n, 3: 4 * n + 4 * n}
    assert needed(cfg, 1).buffers == 4 * n  # one rank sends nothing
    low = {"lower_precision_safe_modules": ["torch.nn.Linear"]}
    cfg.engine.deepspeed = {"zero_optimization": {"reduce_bucket_size": 1000}}
    assert needed(cfg, 4).buffers == 2 * 4 * 1000
    cfg.train.precision = "bf16"
    assert needed(cfg, 4).buffers == 2 * 4 * 1000
    cfg.engine.deepspeed["torch_autocast"] = low  # two dtypes are sent
    assert needed(cfg, 4).buffers == 4 * 4 * 1000
    cfg.engine.deepspeed["zero_optimization"]["overlap_comm"] = False
    assert needed(cfg, 4).buffers == 2 * 4 * 1000


def test_buffers_follow_a_json_file_too(tmp_path):
    cfg = tiny()
    raw = {"zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": False}}
    (tmp_path / "deepspeed.json").write_text(json.dumps(raw))
    cfg.engine.deepspeed = str(tmp_path / "deepspeed.json")
    assert needed(cfg, 4).buffers == 4 * 1000


@pytest.mark.parametrize("gpus, gib", [(1, 0.19), (4, 0.37)])
def test_buffers_of_the_160m_model_are_smaller_than_its_gradients(gpus, gib):
    """DeepSpeed's default of 5e8 numbers with overlap_comm takes 3.7 GiB and more."""
    cfg = config.load(LM / "fpmamba_160m_fineweb2b.yaml")
    memory = needed(cfg, gpus)
    assert memory.buffers / 2**30 == pytest.approx(gib, abs=0.01)
    assert memory.buffers < memory.gradients


def test_memory_is_that_of_the_stage_that_deepspeeds_own_json_sets():
    by_key, by_json = tiny(), tiny()
    by_key.engine.zero_stage = 3
    by_json.engine.deepspeed = {"zero_optimization": {"stage": 3}}
    planned = plan(by_json, 4)
    assert planned["memory"] == plan(by_key, 4)["memory"]
    assert planned["stages"] == plan(by_key, 4)["stages"]
    assert shown(planned, by_json)["memory per GPU, ZeRO-3"].endswith("fits, as configured")


def test_activations_grow_with_the_batch_and_shrink_with_checkpointing():
    cfg = tiny(n_layer=8)
    before = needed(cfg).activations
    cfg.train.micro_batch_size *= 2
    assert 1.3 * before < needed(cfg).activations <= 2 * before
    cfg.train.micro_batch_size //= 2
    cfg.model.gradient_checkpointing = True
    assert needed(cfg).activations < before / 2


def test_bf16_keeps_less_than_fp32():
    cfg = tiny(d_model=64)
    cfg.train.micro_batch_size = 16  # of fewer tokens the weights' copies in bf16 are more
    full = needed(cfg).activations
    cfg.train.precision = "bf16"
    assert needed(cfg).activations < full


# What an autograd walk over every tensor of a layer once counted, bytes a token and channel
# (d_model 256, d_state 16, 8 × 1,024 tokens); the walk is gone, the formula stays within a quarter.
COUNTED = [
    (True, "bf16", 113.2, {}, {}),
    (True, "fp32", 129.1, {}, {}),
    (False, "bf16", 42.0, {}, {}),
    (False, "fp32", 56.5, {}, {}),
    (True, "bf16", 250.2, {"mixer_rank": 4}, {}),
    (False, "bf16", 56.6, {"mixer_rank": 4}, {}),
    (True, "bf16", 193.3, {"mixer": "kronecker"}, {}),
    (True, "bf16", 119.3, {"block": "fp_mamba2", "headdim": 64}, {}),
    (True, "bf16", 60.0, {}, {"gradient": "one_step"}),
    (True, "bf16", 60.0, {}, {"token": "iterate", "stopping": "paper"}),
    (True, "bf16", 34.7, {"layers": "mamba"}, {}),
    (False, "fp32", 57.4, {"layers": "mamba"}, {}),
    (True, "bf16", 73.1, {"layers": "mamba2", "headdim": 64}, {}),
    (True, "bf16", 13.2, {"layers": "attention", "headdim": 64}, {}),
    (True, "bf16", 17.3, {"layers": "mlp"}, {}),
    (True, "bf16", 108.7, {"layers": "gated_deltanet", "headdim": 64}, {}),
    (True, "bf16", 158.3, {"layers": "gated_deltaproduct", "headdim": 64}, {}),
]


@pytest.mark.parametrize("on_gpu, precision, counted, model, solver", COUNTED, ids=str)
def test_what_a_layer_keeps_is_what_was_once_counted(on_gpu, precision, counted, model, solver):
    cfg = tiny(solver, **{"d_model": 256, "d_state": 16, **model})
    first, *_ = estimate.kept_by_layers(cfg, on_gpu)
    in_bytes = 4 * first * (estimate.IN_BF16 if precision == "bf16" else 1)
    assert in_bytes == pytest.approx(counted, rel=0.26)


def test_the_formula_by_hand():
    """ZeRO-1, two ranks, fp32, a CPU: 16 layers' channels and 4,096 tokens' logits at most."""
    cfg = tiny(n_layer=2)
    p = plan(cfg, where(cfg, 2, "cpu"))
    n, m, tokens = p["parameters"], p["memory"], 3 * 32
    assert (m.weights, m.gradients, m.master, m.optimizer) == (4 * n, 4 * n, 2 * n, 4 * n)
    assert m.activations == 2 * 14 * 4 * 32 * tokens + 8 * 16 * tokens
    assert m.working == 0.25 * 14 * 4 * 32 * tokens
    assert m.loss == 12 * 64 * tokens and m.runtime == 0
    assert m.total == pytest.approx(14 * n + 4 * n + m.activations + max(m.working, m.loss))
    cfg.train.micro_batch_size = 1000
    assert plan(cfg, where(cfg, 2, "cpu"))["memory"].loss == 12 * 64 * 4096


def test_a_micro_batch_is_measured_beside_the_formula():
    cfg = config.load(LM / "demo.yaml", ["train.micro_batch_size=8"])
    found = measure(cfg)
    assert found.device == "cpu" and found.tokens == 8 * 256 and found.seconds > 0
    assert 0.4 < found.planned_bytes / found.bytes < 2
    rows = dict(found.rows(micro_batches=10))
    assert "by the formula" in rows["measured on cpu"] and "tokens/s" in rows["… one micro-batch"]


# Against the card.


def paper(*overrides: str) -> Config:
    return config.load(LM / "fpmamba_160m_fineweb2b_paper.yaml", overrides)


def test_the_smallest_change_that_fits_is_named_as_it_is_typed():
    cfg = paper("train.micro_batch_size=16")
    p = plan(cfg, where(cfg, 4, "a100-40g"))
    assert not p["fits"]
    said = shown(p, cfg)["to make it fit"]
    assert said.startswith("train.micro_batch_size=8 (then ")
    typed = paper(*said.partition(" (")[0].split())  # and it does, with the global batch kept
    again = plan(typed, where(typed, 4, "a100-40g"))
    assert again["fits"] and again["tokens_per_step"] == p["tokens_per_step"]
    assert "to make it fit" not in shown(again, typed)


def test_checkpointing_is_named_where_no_micro_batch_fits_without():
    cfg = paper("model.n_layer=40", "train.micro_batch_size=2", "data.seq_len=8192")
    p = plan(cfg, where(cfg, 4, "a100-40g"))
    assert not p["fits"] and p["change"][0]["model.gradient_checkpointing"] is True


def test_where_nothing_fits_the_plan_says_so():
    cfg = paper("model.n_layer=400")
    p = plan(cfg, where(cfg, 1, "a100-40g"))
    assert p["change"] is None
    assert "more GPUs, a smaller model" in shown(p, cfg)["to make it fit"]


# Time.


def test_hours_are_flops_over_what_the_cards_reach_and_what_iterating_moves():
    cfg = paper()
    p = plan(cfg, where(cfg, 4, "a100-80g", utilisation=0.5, evaluations=20.0))
    flops = p["flops_per_token"]["evaluations = 1"] * p["tokens"]
    moved = 12 * p["tokens"] * 1536 * 4 * 19 * 25
    assert p["moving_hours"] == pytest.approx(moved / (4 * 0.7 * 2.039e12) / 3600)
    expected = flops / (4 * 312e12 * 0.5) / 3600 + p["moving_hours"]
    assert p["hours"] == pytest.approx(expected)
    said = shown(p, cfg)
    assert f"{p['moving_hours']:,.2f} to move what is iterated, by 20" in said["… memory traffic"]
    computing = flops / (4 * 312e12 * 0.5) / 3600
    assert said["… matrix products"].startswith(f"{computing:,.2f} at 50% of 312 TFLOP/s")
    assert said["hours"] == f"{expected:,.2f}, the sum of these"
    assert "… token after token" not in said
    assert plan(tiny(), where(tiny(), 1, "cpu"))["hours"] is None
    assert plan(tiny(), where(tiny(), 1, "h200"))["moving_hours"] == 0  # token by token


@pytest.mark.parametrize("mixer, moved", [("householder", (22.3, 55)), ("kronecker", (98, 225))])
@pytest.mark.parametrize("gradient, terms", [("one_step", 0), ("exact", 4), ("adjoint:7", 7)])
def test_a_term_of_the_adjoint_moves_memory_too(gradient, terms, mixer, moved):
    cfg = tiny({"schedule": "parallel", "gradient": gradient}, mixer=mixer)
    p = plan(cfg, where(cfg, 2, "h200"))
    by_evaluation, by_term = moved
    numbers = 9 * by_evaluation + terms * by_term
    moved = 2 * p["tokens"] * 2 * cfg.model.d_model * 4 * numbers
    assert p["moving_hours"] == pytest.approx(moved / (2 * 0.7 * 4.8e12) / 3600)


def test_evaluations_are_one_where_tokens_are_solved_one_by_one():
    assert plan(tiny(), where(tiny(), 1, "cpu"))["evaluations"] == 1
    assert plan(tiny(), where(tiny(), 1, "h200"))["evaluations"] == 1
    kronecker = tiny(mixer="kronecker")
    assert plan(kronecker, where(kronecker, 1, "h200"))["evaluations"] == 10  # in windows
    one_of_two = tiny(layers=["fp_mamba1", {"fp_mamba1": {"dt_h_dep": True}}])
    assert plan(one_of_two, where(one_of_two, 1, "h200"))["evaluations"] == 5.5
    wide = tiny(d_model=16_384, mixer_rank=4)  # more than a kernel holds
    assert plan(wide, where(wide, 1, "h200"))["evaluations"] == 10
    assert plan(tiny(name="mamba"), where(tiny(name="mamba"), 1, "h200"))["evaluations"] is None


@pytest.mark.parametrize(
    "model, of_kernel, is_known",
    [
        ({"layers": "mamba fp_mamba1"}, 1, True),
        ({"layers": ["fp_mamba1", {"fp_mamba1": {"mixer_rank": 9}}]}, 1, False),
        ({"mixer": "kronecker"}, 0, False),
        ({"mixer_rank": 9}, 0, False),
        ({"dt_h_dep": True}, 0, False),
        ({"mixer": "kronecker", "layers": [{"fp_mamba1": {"mixer": "dplr"}}]}, 2, True),
    ],
    ids=str,
)
def test_hours_token_by_token_are_those_of_layers_with_a_kernel(model, of_kernel, is_known):
    """What another layer takes token by token on a GPU nobody has measured."""
    cfg = tiny({"schedule": "sequential"}, **model)
    p = plan(cfg, where(cfg, 1, "h200"))
    micro_batches = cfg.train.steps * cfg.train.accumulation(1)
    assert p["launch_hours"] == estimate.launch_hours(of_kernel, 32, micro_batches, 3)
    assert (p["hours"] is not None) == is_known
    assert ("no kernel solves" in shown(p, cfg)["hours"]) != is_known


def test_tokens_one_after_the_other_take_their_time_whatever_their_flops():
    cfg = config.load(LM / "fpmamba_160m_fineweb2b.yaml")
    p = plan(cfg, where(cfg, 4, "a100-80g"))
    micro_batches = cfg.train.steps * cfg.train.accumulation(4)
    seconds = 12 * 2048 * micro_batches * (62.0e-6 + 0.622e-6 * cfg.train.micro_batch_size)
    assert p["launch_hours"] == pytest.approx(seconds / 3600)
    flops = estimate.hours(p["flops"], 4, p["at"].card, "bf16", p["at"].utilisation)
    assert p["hours"] == pytest.approx(flops + p["launch_hours"])
    said = shown(p, cfg)
    assert said["… token after token"].startswith(f"{p['launch_hours']:,.2f} in layers solved")
    # The option acts on the other part alone.
    changed = shown(plan(cfg, where(cfg, 4, "a100-80g", utilisation=0.5)), cfg)
    assert changed["… token after token"] == said["… token after token"]
    assert changed["… matrix products"].startswith(f"{flops / 2:,.2f} at 50%")
    assert plan(paper(), where(paper(), 4, "a100-80g"))["launch_hours"] == 0  # the paper's solver


def test_what_is_sent_in_an_update():
    of = Sizes(1000, 50, 400)  # 400 of the gradients in bf16
    gradients, weights, part = 4 * 600 + 2 * 400, 4000, 7 / 8
    sent = {s: communication(of, 8, s, 3) for s in range(4)}
    assert sent[0] == {"all-reduce of gradients": 2 * part * gradients}
    assert sent[1] == sent[0] | {"all-gather of weights": part * weights}
    assert sent[2] == {
        "all-reduce of gradients": 3 * 2 * part * gradients,
        "all-gather of weights": part * weights,
    }
    assert sent[3] == {
        "reduce-scatter of gradients": 3 * part * gradients,
        "all-gather of weights": 3 * 2 * part * gradients,
    }
    assert sum(communication(of, 1, 1, 3).values()) == 0


def test_hosts_are_linked_by_infiniband():
    assert _link(CARDS["h100-80g"], 1) == ("NVLink", 450e9)
    assert _link(CARDS["l40s"], 1) == ("PCIe", 25e9)
    assert _link(CARDS["h100-80g"], 2) == ("InfiniBand", 50e9)
    cfg = paper()
    assert plan(cfg, where(cfg, 16))["at"].nodes == 2  # eight GPUs a host


@pytest.mark.parametrize(
    "options, words",
    [
        ({"gpu": "a1000"}, "known are a100-40g, a100-80g, l40s, h100-80g, h200, and cpu"),
        ({"nodes": 3}, "4 GPUs do not divide evenly among 3 hosts: give --nodes one of 1, 2, 4"),
        ({"nodes": 8}, "4 GPUs do not divide evenly among 8 hosts"),
        ({"utilisation": 25.0}, "--utilisation is 25: it is the share of the card's peak"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_for_is_refused(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        where(tiny(), 4, **options)


def test_evaluations_of_a_baseline_are_refused():
    with pytest.raises(ConfigError, match="mamba iterates nothing"):
        where(tiny(name="mamba"), 1, evaluations=3.0)


# The shipped configs.


def test_the_papers_model_is_planned_on_the_meta_device(monkeypatch):
    built = []

    def record(cfg, vocab_size, *rest):
        model = build_model(cfg, vocab_size, *rest)
        built.append(({str(w.device) for w in model.parameters()}, cfg.model.n_layer))
        return model

    monkeypatch.setattr(estimate, "build_model", record)
    cfg = paper()
    p = plan(cfg, 4)
    assert built == [({"meta"}, 12)]
    assert p["sequences_per_step"] == 256
    assert p["tokens"] == 4800 * 256 * 2048
    assert 160e6 < p["parameters"] < 175e6
    assert 10 * 2**30 < p["memory"].total < 80 * 2**30


def parameters(name: str) -> int:
    cfg = config.load(LM / f"{name}_fineweb2b.yaml")
    return plan(cfg, 4)["parameters"]


def test_the_papers_baseline_has_half_of_the_parameters_and_the_matched_one_as_many():
    ours = parameters("fpmamba_160m")
    cfg = config.load(LM / "mamba_160m_fineweb2b.yaml")
    p = plan(cfg, 4)
    assert p["parameters_of_fprnn"] == ours
    assert shown(p, cfg)["… beside fprnn"] == (
        "0.50 of its 169.4 M (12 layers, d_model 768, as here)"
    )
    matched = config.load(LM / "mamba_169m_fineweb2b.yaml")  # whose layers are more, not ours
    p = plan(matched, 4)
    assert p["parameters"] == pytest.approx(ours, rel=0.02)
    assert shown(p, matched)["… beside fprnn"].endswith("M (35 layers, d_model 768, as here)")
    for name in ("fpmamba_160m", "mamba_160m", "mamba_169m"):  # what the comments say
        first = (LM / f"{name}_fineweb2b.yaml").read_text().partition("name:")[0]
        assert f"{parameters(name) / 1e6:.1f} M" in first


def shown(p: dict, cfg: Config) -> dict[str, str]:
    """The rows of the table."""
    table = describe(p, cfg)
    return dict(zip(*(list(column.cells) for column in table.columns)))


def test_the_plan_says_whether_data_repeats():
    cfg = paper()
    p = plan(cfg, 4)
    assert (p["tokens"], p["dataset_tokens"]) == (2_516_582_400, 9.5e9)
    assert shown(p, cfg)["passes over the data"] == "0.26: nothing is read twice"
    cfg.train.steps = 48_000
    repeated = shown(plan(cfg, 4), cfg)["passes over the data"]
    assert repeated.startswith("2.65: data repeats; after each pass the documents come again")
    assert shown(p, cfg)["tokens in the data"].endswith("share; GPT-2's tokens)")
    cfg.data.name = "CC-MAIN-2024-10"
    rows = shown(plan(cfg, 4), cfg)
    assert rows["tokens in the data"] == (
        "how many HuggingFaceFW/fineweb CC-MAIN-2024-10 has is not known here"
    )
    assert rows["passes over the data"].startswith("not known; after each")


def test_the_plan_says_whose_tokens_a_hub_dataset_is_counted_in():
    cfg = paper()
    cfg.tokenizer = Tokenizer(vocab_size=300)
    rows = shown(plan(cfg, 4), cfg)
    assert "; GPT-2's tokens, those of `bpe` will be more or fewer" in rows["tokens in the data"]
    assert rows["passes over the data"].startswith("about 0.26 (in GPT-2's tokens): nothing")


def test_the_tokens_of_a_local_source_are_those_that_were_tokenised(tmp_path, byte_tokenizer):
    from lm.data.corpus.prepare import prepare
    from lm.data.corpus.tokenizer import load_tokenizer

    def local(**data) -> Config:
        cfg = tiny()
        cfg.out_dir = str(tmp_path)
        cfg.tokenizer.name = str(byte_tokenizer)
        cfg.data = Data(seq_len=32, **data)
        return cfg

    corpus = ROOT / "tests/data/tiny.jsonl"
    cfg = local(source="jsonl", path=str(corpus))
    p = plan(cfg, 1)
    assert p["dataset_tokens"] is p["passes"] is None
    assert "known once `jsonl` is tokenised" in shown(p, cfg)["tokens in the data"]

    meta = prepare(cfg, load_tokenizer(cfg, cfg.run_dir), cfg.run_dir).meta
    cfg.train.steps = 1 + 3 * meta.train_tokens // (3 * 2 * 32)
    p = plan(cfg, 1)
    assert p["dataset_tokens"] == meta.train_tokens
    said = shown(p, cfg)["passes over the data"]
    assert said.endswith(": data repeats; after each pass its blocks come again in a new order")
    assert 3 <= float(said.partition(":")[0]) < 3.2

    others = [local(source="text", path=str(corpus)), local(source="jsonl", path=str(corpus))]
    others[1].tokenizer = Tokenizer(vocab_size=300)
    for other in others:
        p = plan(other, 1)
        assert p["dataset_tokens"] is None
        assert "known once" in shown(p, other)["tokens in the data"]


@pytest.mark.parametrize("until, passes", [(None, 14), (3, 11), (9, 7)])
def test_an_update_against_the_adversary_is_two_passes(until, passes):
    cfg = tiny()
    plain = plan(cfg, where(cfg, 1, "h200"))
    cfg.train.adversary = 0.1
    if until:
        data = cfg.data.model_copy(update={"curriculum": [Stage(until=until, weights={})]})
        cfg = cfg.model_copy(update={"data": data})
    p = plan(cfg, where(cfg, 1, "h200"))
    assert p["tokens"] == plain["tokens"]
    for key in ("hours", "flops"):
        assert p[key] == pytest.approx(plain[key] * passes / 7)
    assert f"two passes in {passes - 7} updates" in shown(p, cfg)["hours"]
    assert "two passes" not in shown(plain, tiny())["hours"]


def test_where_a_stage_waits_the_plan_says_at_least():
    mixture = {"words": {"source": "traces", "weight": 1}}
    stage = {"until": 3, "at": 0.9, "weights": {"words": 1}}
    data = {"seq_len": 32, "mixture": mixture, "curriculum": [stage]}
    cfg = tiny().model_copy(update={"data": Data(**data)})
    cfg.train.adversary = 0.1
    assert (
        "two passes in at least 4 updates" in shown(plan(cfg, where(cfg, 1, "h200")), cfg)["hours"]
    )


def test_the_plan_as_a_table():
    from rich.console import Console

    cfg = config.load(LM / "mamba_160m_fineweb2b.yaml")
    p = plan(cfg, 4)
    file = io.StringIO()
    Console(file=file, width=120).print(describe(p, cfg))
    text = file.getvalue()
    assert "Plan of mamba_160m_fineweb2b" in text
    assert "hours" in text
    for shown in (f"{p['parameters'] / 1e6:,.1f} M", "256 of 2,048 tokens", "524,288", "2.517 B",
                  "50,264", "FLOPs per token", "memory: logits", "ZeRO-1"):  # fmt: skip
        assert shown in text, shown


@pytest.mark.parametrize("name", get_args(Model.model_fields["name"].annotation))
def test_every_model_has_a_plan(name):
    made = plan(tiny(name=name, d_model=64, headdim=16), 2)
    assert made["parameters"] > 0 and all(v > 0 for v in made["flops_per_token"].values())
    assert all(v >= 0 for v in made["memory"]) and made["hours"] > 0


@pytest.mark.parametrize(
    "cfg, seconds, words",
    [
        (tiny(mixer="kronecker"), 3.0, "about 2 min or more here .*mixer kronecker .*mixer=dplr"),
        (tiny(mixer="kronecker"), 1.0, None),
        (tiny(), 60.0, None),  # a householder's tokens are solved one by one: it is not timed
        (tiny(name="mamba"), 60.0, None),
    ],
)
def test_a_run_of_slow_updates_says_so_before_it_starts(cfg, seconds, words, monkeypatch):
    """An update here is 2 micro-batches of 32 tokens, of which 2 are timed."""
    trained = []

    def pass_of(model, ids, cfg):
        trained.append(tuple(ids.shape))
        return seconds

    monkeypatch.setattr("lm.report.slow.time_pass", pass_of)
    before = torch.get_rng_state()
    note = warn_if_slow(cfg, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(trained) <= {(3, 2)}
    assert note is None if words is None else re.search(words, note)


def test_a_card_that_is_not_listed_is_described():
    described = where(tiny(), 2, "b200:2250:178:8").card
    assert described.name == "b200" and described.memory == 178 * 2**30
    assert described.peak == {"bf16": 2250e12, "fp32": 2250e12} and described.bandwidth == 8e12
    assert (
        "2 × b200 in 1 host"
        in shown(plan(tiny(), where(tiny(), 2, "b200:2250:178:8")), tiny())["ranks (GPUs)"]
    )
    for wrong in ("b200:2250:178", "b200:0:178:8", "b200:x:178:8", ":1:1:1", "b200:inf:1:1"):
        with pytest.raises(ConfigError, match=f"--gpu {wrong}: .* is NAME:TFLOPS:GIB:TBPS"):
            where(tiny(), 2, wrong)
    with pytest.raises(ConfigError, match="Any other is described by its data sheet: NAME:TFLOPS"):
        where(tiny(), 2, "b200")
