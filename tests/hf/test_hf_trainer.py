"""Tests with the defaults of transformers' Trainer: accumulation, evaluation, prediction."""

import pytest
import torch

from tests.hf.models import BASELINES, BLOCKS, FEW, VOCAB, build, build_fp64, few_models, make_ids
from tests.marks import slow


def make_rows(count=4, length=9):
    """Return sequences with very different numbers of targets: 8, 6, 4, …"""
    labels = make_ids(count, length).clone()
    for row in range(count):
        labels[row, length - 2 * row :] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(make_ids(count, length), labels)]


def make_trainer(model, path, data=None, **arguments):
    from transformers import Trainer, TrainingArguments  # takes 3 seconds, in every test process

    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    one_step = {"max_steps": 1, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1}
    training_arguments = TrainingArguments(str(path), **{**quiet, **one_step, **arguments})
    data = make_rows() if data is None else data
    return Trainer(model, training_arguments, train_dataset=data, eval_dataset=data)


def train_one_update(model, path, micro_batches, **arguments):
    """Return the logged loss and the weights after an update on the same four sequences."""
    trainer = make_trainer(
        model,
        path,
        per_device_train_batch_size=4 // micro_batches,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0,
        **arguments,
    )
    trainer.train()
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, dict(model.named_parameters())


@pytest.mark.parametrize(
    "name",
    [name if name in ("fp_mamba1", "mamba") else slow(name) for name in (*BLOCKS, *BASELINES)],
)
def test_accumulated_micro_batches_equal_one_large_batch(name, tmp_path):
    loss, weights = train_one_update(build_fp64(name), tmp_path, micro_batches=1)
    mean_loss, accumulated = train_one_update(build_fp64(name), tmp_path, micro_batches=4)
    assert mean_loss == pytest.approx(loss, rel=1e-6)
    before = dict(build_fp64(name).named_parameters())
    assert any((weights[key] - before[key]).abs().max() > 1e-3 for key in weights)
    for key, weight in weights.items():
        torch.testing.assert_close(accumulated[key], weight, rtol=1e-7, atol=1e-7, msg=key)


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("item_count", [7, torch.tensor(7), torch.tensor([7])])
def test_loss_is_divided_by_num_items_in_batch(item_count, loss_only):
    model, x = build_fp64("fp_mamba2").eval(), make_ids()
    mean, target_count = model(x, labels=x).loss, 2 * 8
    loss = model(x, labels=x, num_items_in_batch=item_count, loss_only=loss_only).loss
    torch.testing.assert_close(loss.squeeze(), mean * target_count / 7)


def test_label_smoothing_shifts_the_labels(tmp_path):
    for name in ("fp_mamba1", "lstm"):
        model, data = build_fp64(name), make_rows()
        trainer = make_trainer(model, tmp_path, data, label_smoothing_factor=0.25)
        batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
        loss = trainer.compute_loss(model.eval(), dict(batch))
        logits = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(
            logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.25
        )
        torch.testing.assert_close(loss, expected)


@few_models
def test_evaluate_predict_and_compute_metrics(name, tmp_path):
    shapes, model = [], build(name)

    def compute_metrics(prediction):
        shapes.extend([prediction.predictions.shape, prediction.label_ids.shape])
        return {"right": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}

    trainer = make_trainer(model, tmp_path, per_device_eval_batch_size=3)
    trainer.compute_metrics = compute_metrics
    metrics = trainer.evaluate()
    assert shapes == [(4, 9, VOCAB), (4, 9)] and "eval_right" in metrics
    batch = {key: torch.stack([row[key] for row in make_rows()]) for key in ("input_ids", "labels")}
    model.eval()
    with torch.no_grad():
        losses = [model(x, labels=y).loss for x, y in zip(*(t.split(3) for t in batch.values()))]
    # The batches have 3 and 1 sequences.
    assert metrics["eval_loss"] == pytest.approx((3 * losses[0] + losses[1]).item() / 4, rel=1e-4)
    assert trainer.predict(make_rows()).predictions.shape == (4, 9, VOCAB)


@pytest.mark.parametrize("name", FEW)
def test_padding_free_batches_train_like_padded_ones(name, tmp_path):
    from transformers import DataCollatorWithFlattening

    data = [{"input_ids": make_ids(1, n, seed=n)[0].tolist()} for n in (5, 9, 3)]
    trainer = make_trainer(build_fp64(name), tmp_path, data)
    flat = DataCollatorWithFlattening()(data)
    assert flat["input_ids"].shape == (1, 17) and (flat["position_ids"] == 0).sum() == 3
    model = trainer.model.eval()
    alone = [torch.tensor([row["input_ids"]]) for row in data]
    loss_sum = sum(model(x, labels=x).loss * (x.shape[1] - 1) for x in alone)
    target_count = 4 + 8 + 2  # all tokens except the first of each document
    torch.testing.assert_close(model(**flat).loss, loss_sum / target_count, rtol=1e-6, atol=1e-8)
    trainer.data_collator = DataCollatorWithFlattening()
    trainer.train()
