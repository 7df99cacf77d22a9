"""Engine: learning rates, parameter groups, DeepSpeed's JSON, and updates on two ranks."""

import math
from types import SimpleNamespace

import pytest
import torch

from lm.common import ranks
from lm.common.errors import ConfigError, TrainingError
from lm.config.schema import Optim
from lm.training import deepspeed_json, optim
from lm.training.build import build_model
from lm.training.engine import Engine
from tests.running import run


def cosine_rate(settings, update, warmup_updates, steps):
    """Return the learning rate of an update: linear to the peak, then a cosine to min_lr."""
    if update <= warmup_updates:
        return settings.lr * update / warmup_updates
    progress = (update - warmup_updates) / (steps - warmup_updates)
    height = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * height


@pytest.mark.parametrize(
    "steps, warmup, warmup_updates", [(100, 0.1, 10), (12, 4, 4), (1, 0.1, 1), (50, 0, 1)]
)
def test_lr_equals_the_formula(steps, warmup, warmup_updates):
    settings = Optim(lr=4e-3, min_lr=1e-5, warmup=warmup)
    rates = {k: settings.lr * optim.lr_factor(settings, steps, k) for k in range(1, steps + 1)}
    for update, rate in rates.items():
        expected = cosine_rate(settings, update, warmup_updates, steps)
        assert rate == pytest.approx(expected, rel=1e-12)
    assert rates[warmup_updates] == pytest.approx(4e-3)
    if steps > warmup_updates:
        assert rates[steps] == pytest.approx(1e-5)


def test_linear_and_constant_schedules():
    linear = Optim(lr=1.0, min_lr=0.2, warmup=2, schedule="linear")
    assert [optim.lr_factor(linear, 6, k) for k in range(1, 7)] == pytest.approx(
        [0.5, 1, 0.8, 0.6, 0.4, 0.2]
    )
    constant = Optim(lr=1.0, warmup=2, schedule="constant")
    assert [optim.lr_factor(constant, 4, k) for k in (1, 2, 3, 4)] == [0.5, 1, 1, 1]


@pytest.mark.parametrize("name", ["fprnn", "mamba"])
def test_weight_decay_spares_a_d_norms_biases_and_gains(tiny, name):
    model = build_model(tiny(f"model.name={name}"), vocab_size=32)
    groups = optim.torch_param_groups(model, Optim())
    names = {id(p): n for n, p in model.named_parameters()}
    with_decay, without_decay = ({names[id(p)] for p in group["params"]} for group in groups)
    assert groups[0]["weight_decay"] == 0.1 and groups[1]["weight_decay"] == 0.0
    assert with_decay | without_decay == set(names.values()) and not with_decay & without_decay
    for n in without_decay:
        assert n.rpartition(".")[2] in ("A_log", "D", "bias", "gain") or "norm" in n, n
    for n in with_decay:
        assert dict(model.named_parameters())[n].ndim >= 2, n
    assert any("embedding" in n for n in with_decay)
    assert any(n.endswith("in_proj.weight") for n in with_decay)


def test_deepspeed_config_matches_the_yaml(tiny, tmp_path):
    cfg = tiny("optim.grad_clip=0.5", "engine.zero_stage=2", "train.precision=bf16")
    derived = deepspeed_json.deepspeed_config(cfg, world_size=4)
    assert derived["train_batch_size"] == 2 * 2 * 4  # micro-batch, accumulation, ranks
    assert derived["gradient_clipping"] == 0.5 and derived["zero_optimization"]["stage"] == 2
    assert derived["torch_autocast"] == {
        "enabled": True,
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],
    }
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"overlap_comm": true}, "prescale_gradients": true}')
    merged = deepspeed_json.deepspeed_config(tiny(f"engine.deepspeed={file}"), world_size=1)
    assert merged["zero_optimization"]["overlap_comm"] is True
    assert merged["zero_optimization"]["stage"] == 1 and merged["prescale_gradients"] is True
    (tmp_path / "list.json").write_text("[1]")
    for path, words in [
        ("missing.json", r"cannot read .*missing\.json"),
        ("/dev/zero", "/dev/zero is no file"),
        (tmp_path / "list.json", r"list\.json must hold a mapping of keys to values"),
    ]:
        with pytest.raises(ConfigError, match=words):
            deepspeed_json.deepspeed_config(tiny(f"engine.deepspeed={path}"), world_size=1)


@pytest.mark.parametrize(
    "parameter_count, largest_tensor, size",
    [(7, 4, 7), (10**9, 10, 5 * 10**7), (10**9, 6 * 10**7, 6 * 10**7)],
    ids=["the model", "MAX_BUCKET_ELEMENTS", "the largest tensor"],
)
def test_size_of_the_gradient_buffer(parameter_count, largest_tensor, size):
    assert deepspeed_json.bucket_size(parameter_count, largest_tensor) == size


def test_persistent_kernels_do_not_overlap_with_nccl(tiny, monkeypatch):
    for backend, overlaps in (("auto", True), ("cuda", False)):
        monkeypatch.setenv("FPRNN_KERNELS", backend)
        config = deepspeed_json.deepspeed_config(tiny(), 4, on_gpu=True)
        assert config["zero_optimization"]["overlap_comm"] is overlaps


def test_lr_of_every_update_is_applied(tiny_losses):
    settings = Optim(lr=1e-2)
    # The tiny run has 8 updates, and its warm-up is 0.1 of them: one update.
    expected = [cosine_rate(settings, k, warmup_updates=1, steps=8) for k in range(1, 9)]
    assert [r["lr"] for r in tiny_losses] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))]
)
def test_two_ranks_have_the_losses_of_one(tmp_path, tiny_losses, stage):
    """One rank accumulates two micro-batches; two ranks have one each.

    The slow cases use the `deepspeed` launcher, whose imports would take most of the time.
    """
    settings = ("train.grad_accum_steps=1", f"engine.zero_stage={stage}")
    records, _ = run(tmp_path / "runs", *settings, processes=2, launcher=stage != 3)
    actual, expected = ([r["loss"] for r in rs] for rs in (records, tiny_losses))
    assert actual == pytest.approx(expected, abs=1e-4)
    norms = [[r["grad_norm"] for r in rs] for rs in (records, tiny_losses)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("stage", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1))])
def test_bf16_trains_near_fp32(tmp_path, tiny_losses, stage):
    records, _ = run(tmp_path / "runs", "train.precision=bf16", f"engine.zero_stage={stage}")
    actual, expected = ([r["loss"] for r in rs] for rs in (records, tiny_losses))
    assert actual == pytest.approx(expected, rel=0.02)
    assert actual != expected


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        ({"gradient_accumulation_steps": 7}, "sets gradient_accumulation_steps to 7"),
        ({"gradient_clipping": "auto"}, 'holds "auto"'),
        ({"zero_optimization": 3}, "sets zero_optimization to 3: it must be a mapping"),
        ({"zero_optimization": {"stage": 5}}, "stage of zero_optimization to 5: it must be one of"),
        ({"zero_optimization": {"stage": True}}, "stage of zero_optimization to True"),
        ({"gradient_clipping": math.nan}, "gradient_clipping to nan: it must be a norm of at lea"),
        ({"gradient_clipping": "x"}, "sets gradient_clipping to 'x': it must be a number"),
        ({"zero_optimization": {"overlap_comm": 3}}, "overlap_comm of zero_optimization to 3: it"),
        ({"torch_autocast": {}}, "sets torch_autocast, which is derived from `train.precision`"),
        ({"optimizer": {}}, "sets optimizer, which is derived from `optim`"),
        ({"communication_data_type": "bf16"}, "DeepSpeed ignores with autocast and ZeRO"),
    ],
)
def test_wrong_deepspeed_json_is_refused(tiny, overrides, sentence):
    cfg = tiny("train.precision=bf16")
    cfg.engine.deepspeed = overrides
    with pytest.raises(ConfigError, match=sentence):
        deepspeed_json.deepspeed_config(cfg, world_size=1)


def test_errors_of_deepspeed_are_one_sentence(tmp_path):
    with pytest.raises(AssertionError) as caught:
        run(tmp_path / "runs", "engine.deepspeed={bf16: {enabled: x}}")
    message = "error: DeepSpeed does not start with the keys of engine.deepspeed: ValidationError: "
    assert message in str(caught.value) and "Traceback" not in str(caught.value)


def test_single_slurm_task_needs_no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert ranks.read_launcher_ranks() == (0, 1, 0)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert ranks.read_launcher_ranks() == (3, 4, 1)


# Micro-batches with four targets, one and none, such as the padded end of a corpus.
LABELS = [[1, 2, 3, 4]], [[1, -100, -100, -100]], [[-100] * 4]
MICRO_BATCHES = [{"labels": torch.tensor(labels)} for labels in LABELS]


def fake_engine(*other_values):
    """Return a fake Engine on one of two ranks; the other rank adds these numbers to sums."""
    ranks = SimpleNamespace(world_size=2)
    ranks.sum = lambda *values: [a + b for a, b in zip(values, other_values)]
    return SimpleNamespace(ranks=ranks, deepspeed=SimpleNamespace(eval=lambda: None))


def test_micro_batches_are_weighted_by_their_targets():
    """Five targets on this rank and six on the other are 11 targets in six micro-batches."""
    weights = Engine._loss_weights(fake_engine(6), MICRO_BATCHES)
    assert weights == pytest.approx([4 * 6 / 11, 6 / 11, 0])


def test_validation_loss_is_the_mean_over_targets():
    """This rank has losses 2 and 5 over 4 targets and 1; the other has loss 3 over 6 targets.

    The loss of a micro-batch without targets is NaN and does not count.
    """
    losses = iter([2.0, 5.0, math.nan])
    engine = fake_engine(6 * 3, 6)  # sum of losses, targets
    engine.forward = lambda batch: SimpleNamespace(loss=torch.tensor(next(losses)))
    measured = Engine.validate(engine, MICRO_BATCHES)
    mean = (4 * 2 + 5 + 6 * 3) / 11
    assert measured == {"loss": mean, "perplexity": pytest.approx(math.exp(mean)), "tokens": 11}


def test_batch_without_targets_is_refused():
    engine = fake_engine(0, 0)
    engine.forward = lambda batch: SimpleNamespace(loss=torch.tensor(math.nan))
    with pytest.raises(TrainingError, match="an update has nothing to learn from: every label"):
        Engine._loss_weights(engine, MICRO_BATCHES[2:])
    with pytest.raises(TrainingError, match="a validation has nothing to measure: every label"):
        Engine.validate(engine, MICRO_BATCHES[2:])
