"""Tests with the defaults of transformers' Trainer: accumulation, evaluation, prediction."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from tests.hf.models import BASELINES, BLOCKS, VOCAB, build, exact, ids
from tests.marks import slow

every_model = pytest.mark.parametrize("name", [*BLOCKS, *BASELINES])


def rows(count=4, length=9):
    """Return sequences with very different numbers of targets: 8, 6, 4, …"""
    labels = ids(count, length).clone()
    for row in range(count):
        labels[row, length - 2 * row :] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids(count, length), labels)]


def trainer(model, path, data=None, **arguments):
    fixed = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    steps = {"max_steps": 1, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1}
    arguments = TrainingArguments(str(path), **{**fixed, **steps, **arguments})
    data = rows() if data is None else data
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data)


def one_update(model, path, micro_batches, **arguments):
    """Return the logged loss and the weights after an update on the same four sequences."""
    made = trainer(
        model,
        path,
        per_device_train_batch_size=4 // micro_batches,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0,
        **arguments,
    )
    made.train()
    (loss,) = (entry["loss"] for entry in made.state.log_history if "loss" in entry)
    return loss, dict(model.named_parameters())


@pytest.mark.parametrize(
    "name",
    [name if name in ("fp_mamba1", "mamba") else slow(name) for name in (*BLOCKS, *BASELINES)],
)
def test_accumulated_micro_batches_equal_one_large_batch(name, tmp_path):
    loss, weights = one_update(exact(name), tmp_path, 1)
    accumulated, others = one_update(exact(name), tmp_path, 4)
    assert accumulated == pytest.approx(loss, rel=1e-6)
    before = dict(exact(name).named_parameters())
    assert any((weights[key] - before[key]).abs().max() > 1e-3 for key in weights)
    for key, weight in weights.items():
        torch.testing.assert_close(others[key], weight, rtol=1e-7, atol=1e-7, msg=key)


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("counted", [7, torch.tensor(7), torch.tensor([7])])
def test_loss_is_divided_by_num_items_in_batch(counted, loss_only):
    model, x = exact("fp_mamba2").eval(), ids()
    mean, total = model(x, labels=x).loss, 2 * 8
    loss = model(x, labels=x, num_items_in_batch=counted, loss_only=loss_only).loss
    torch.testing.assert_close(loss.squeeze(), mean * total / 7)


def test_label_smoothing_shifts_the_labels(tmp_path):
    for name in ("fp_mamba1", "lstm"):
        model, data = exact(name), rows()
        made = trainer(model, tmp_path, data, label_smoothing_factor=0.25)
        batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
        loss = made.compute_loss(model.eval(), dict(batch))
        logits = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(
            logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.25
        )
        torch.testing.assert_close(loss, expected)


@every_model
def test_evaluate_predict_and_compute_metrics(name, tmp_path):
    seen, model = {}, build(name)

    def compute_metrics(prediction):
        seen["shapes"] = prediction.predictions.shape, prediction.label_ids.shape
        return {"right": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}

    made = trainer(model, tmp_path, per_device_eval_batch_size=3)
    made.compute_metrics = compute_metrics
    metrics = made.evaluate()
    assert seen["shapes"] == ((4, 9, VOCAB), (4, 9)) and "eval_right" in metrics
    batch = {key: torch.stack([row[key] for row in rows()]) for key in ("input_ids", "labels")}
    model.eval()
    with torch.no_grad():
        losses = [model(x, labels=y).loss for x, y in zip(*(t.split(3) for t in batch.values()))]
    assert metrics["eval_loss"] == pytest.approx((3 * losses[0] + losses[1]).item() / 4, rel=1e-4)
    assert made.predict(rows()).predictions.shape == (4, 9, VOCAB)


@pytest.mark.parametrize("name", ["fp_mamba1", "lstm", "transformer"])
def test_padding_free_batches_train_like_padded_ones(name, tmp_path):
    data = [{"input_ids": ids(1, n, seed=n)[0].tolist()} for n in (5, 9, 3)]
    made = trainer(exact(name), tmp_path, data)
    flat = DataCollatorWithFlattening()(data)
    assert flat["input_ids"].shape == (1, 17) and (flat["position_ids"] == 0).sum() == 3
    model = made.model.eval()
    alone = [torch.tensor([row["input_ids"]]) for row in data]
    total = sum(model(x, labels=x).loss * (x.shape[1] - 1) for x in alone)
    torch.testing.assert_close(model(**flat).loss, total / 14, rtol=1e-6, atol=1e-8)
    made.data_collator = DataCollatorWithFlattening()
    made.train()
