"""The cost of a run before it starts, against real models and a count of their products."""

import io
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm import config
from lm import plan as planning
from lm.build import build_model
from lm.config import Config, ConfigError, Data, Model, Tokenizer
from lm.plan import describe, plan

ROOT = Path(__file__).parents[2]
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


def test_memory_falls_with_the_zero_stage():
    totals, shards = [], {}
    for stage in (0, 1, 2, 3):
        cfg = tiny()
        cfg.engine.zero_stage = stage
        p = plan(cfg, 4)
        shards[stage] = p["memory_per_gpu"]
        totals.append(sum(p["memory_per_gpu"].values()))
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4
    n = p["parameters"]
    assert shards[0]["weights"] == 4 * n and shards[0]["optimizer"] == 8 * n
    assert shards[1]["optimizer"] == 8 * n / 4 and shards[1]["gradients"] == 4 * n
    assert shards[2]["gradients"] == 4 * n / 4 and shards[2]["weights"] == 4 * n
    assert shards[3]["weights"] == 4 * n / 4


def test_memory_is_that_of_the_stage_that_deepspeeds_own_json_sets():
    by_key, by_json = tiny(), tiny()
    by_key.engine.zero_stage = 3
    by_json.engine.deepspeed = {"zero_optimization": {"stage": 3}}
    planned = plan(by_json, 4)
    assert planned["memory_per_gpu"] == plan(by_key, 4)["memory_per_gpu"]
    assert "memory per GPU, ZeRO-3" in shown(planned, by_json)


def activations(cfg: Config) -> float:
    return plan(cfg, 1)["memory_per_gpu"]["activations"]


def test_activations_grow_with_the_batch_and_shrink_with_checkpointing():
    cfg = tiny(n_layer=8)
    before = activations(cfg)
    cfg.train.micro_batch_size *= 2
    assert 1.8 * before < activations(cfg) <= 2 * before
    cfg.train.micro_batch_size //= 2
    cfg.model.gradient_checkpointing = True
    assert activations(cfg) < before / 2


def test_bf16_keeps_less_than_fp32():
    cfg = tiny(d_model=64)
    full = activations(cfg)
    cfg.train.precision = "bf16"
    assert activations(cfg) < full


def test_what_a_block_keeps_is_what_a_longer_batch_keeps():
    """The estimate from lengths 64 and 256 holds at another length."""
    cfg = tiny()
    per_token, constant = planning.saved_bytes(cfg)
    block = build_model(tiny({"max_iters": 1}, n_layer=1), 8).backbone.layers[0].train()
    owned = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    u = torch.randn(1, 640, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = block(u, None)
    real = sum(size for address, size in kept.items() if address not in owned)
    assert output[0].requires_grad
    assert 640 * per_token + constant == pytest.approx(real, rel=0.1)


# The shipped configs.


def test_the_papers_model_is_planned_on_the_meta_device(monkeypatch):
    built = []

    def record(cfg, vocab_size, *rest):
        model = build_model(cfg, vocab_size, *rest)
        built.append(({str(w.device) for w in model.parameters()}, cfg.model.n_layer))
        return model

    monkeypatch.setattr(planning, "build_model", record)
    cfg = config.load(LM / "fpmamba_160m_fineweb2b.yaml")
    p = plan(cfg, cfg.train.world_size)
    assert built[0] == ({"meta"}, 12)
    assert all(layers == 1 for _, layers in built[1:])  # what is counted on, not trained
    assert p["sequences_per_step"] == 256
    assert p["tokens"] == 4800 * 256 * 2048
    assert 160e6 < p["parameters"] < 175e6
    assert 10 * 2**30 < sum(p["memory_per_gpu"].values()) < 80 * 2**30


def parameters(name: str) -> int:
    cfg = config.load(LM / f"{name}_fineweb2b.yaml")
    return plan(cfg, cfg.train.world_size)["parameters"]


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
    cfg = config.load(LM / "fpmamba_160m_fineweb2b.yaml")
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
    cfg = config.load(LM / "fpmamba_160m_fineweb2b.yaml")
    cfg.tokenizer = Tokenizer(vocab_size=300)
    rows = shown(plan(cfg, 4), cfg)
    assert "; GPT-2's tokens, those of `bpe` will be more or fewer" in rows["tokens in the data"]
    assert rows["passes over the data"].startswith("about 0.26 (in GPT-2's tokens): nothing")


def test_the_tokens_of_a_local_source_are_those_that_were_tokenised(tmp_path, byte_tokenizer):
    from lm.data.prepare import prepare
    from lm.data.tokenizer import load_tokenizer

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


def test_the_plan_as_a_table():
    from rich.console import Console

    cfg = config.load(LM / "mamba_160m_fineweb2b.yaml")
    p = plan(cfg, 4)
    file = io.StringIO()
    Console(file=file, width=120).print(describe(p, cfg))
    text = file.getvalue()
    assert "Plan of mamba_160m_fineweb2b" in text
    for shown in (f"{p['parameters'] / 1e6:,.1f} M", "256 of 2,048 tokens", "524,288", "2.517 B",
                  "50,264", "FLOPs per token, mamba", "memory: logits", "ZeRO-1"):  # fmt: skip
        assert shown in text, shown


@pytest.mark.parametrize("name", get_args(Model.model_fields["name"].annotation))
def test_every_model_has_a_plan(name):
    made = plan(tiny(name=name, d_model=64, headdim=16), 2)
    assert made["parameters"] > 0 and all(v > 0 for v in made["flops_per_token"].values())
    assert all(v >= 0 for v in made["memory_per_gpu"].values())
