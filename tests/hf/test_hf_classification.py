"""FPRNNForSequenceClassification: padding, losses, loading of a language model, trainers."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

import fprnn  # noqa: F401 (registers the Auto classes)
from lm.export.export import write_export
from lm.model.modeling_fprnn import FPRNNForSequenceClassification
from tests.hf.models import BLOCKS, PAD, VOCAB, build, fprnn_config, make_ids
from tests.hf.test_hf_export import elsewhere, warm_cache

LOW_TOLERANCE = dict(contractive=0.2, schedule="sequential", eval_tol=1e-10, tol=1e-10)


def build_classifier(block="fp_mamba1", num_labels=3, **fields):
    torch.manual_seed(0)
    config = fprnn_config(block, **{**LOW_TOLERANCE, "num_labels": num_labels, **fields})
    return FPRNNForSequenceClassification(config).double().eval()


def pad_rows(rows, side):
    """Return input_ids and attention_mask of sequences of several lengths."""
    length = max(map(len, rows))
    tokens = torch.full((len(rows), length), PAD)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        place = slice(len(row)) if side == "right" else slice(length - len(row), length)
        tokens[i, place], mask[i, place] = row, 1
    return tokens, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("block", [*BLOCKS, "hybrid"])
@torch.no_grad()
def test_row_is_scored_by_its_last_token(block, side):
    if block == "hybrid":
        model = build_classifier(layers=["fp_mamba1", "mamba", "attention"], n_layer=3)
    else:
        model = build_classifier(block)
    rows = [make_ids(1, n, seed=n)[0] for n in (7, 3, 1)]
    tokens, mask = pad_rows(rows, side)
    alone = torch.cat([model(row[None]).logits for row in rows])
    out = model(tokens, mask, output_hidden_states=True)
    torch.testing.assert_close(out.logits, alone)
    assert out.logits.dtype == torch.float64 and out.logits.shape == (3, 3)
    by_hand = model.score(out.hidden_states[-1][0, 6 if side == "left" else len(rows[0]) - 1])
    torch.testing.assert_close(out.logits[0], by_hand)
    embeds = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(model(None, mask, embeds).logits, alone)
    if side == "right":  # padding is info by its id
        torch.testing.assert_close(model(tokens).logits, alone)


def test_rows_whose_ends_are_unknown_are_refused():
    model = build_classifier(pad_token_id=None)
    with pytest.raises(ValueError, match="a batch of 2 rows needs an attention_mask"):
        model(make_ids(2, 5))
    assert model(make_ids(1, 5)).logits.shape == (1, 3)
    with pytest.raises(TypeError, match="does not know the argument lables"):
        model(make_ids(1, 5), lables=1)


@pytest.mark.parametrize(
    "num_labels, labels, loss",
    [
        (3, torch.tensor([2, 0]), nn.functional.cross_entropy),
        (1, torch.tensor([0.5, -1.0]).double(), lambda x, y: nn.functional.mse_loss(x[:, 0], y)),
        (
            3,
            torch.tensor([[1, 0, 1], [0, 0, 1]]).double(),
            nn.functional.binary_cross_entropy_with_logits,
        ),
    ],
    ids=["classes", "numbers", "several labels"],
)
def test_loss_matches_label_kind_and_reaches_every_weight(num_labels, labels, loss):
    model = build_classifier(num_labels=num_labels).train()
    out = model(make_ids(2, 6), labels=labels)
    torch.testing.assert_close(out.loss, loss(out.logits, labels))
    out.loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.numel() > 1)
    as_tuple = model(make_ids(2, 6), labels=labels, return_dict=False)
    torch.testing.assert_close(as_tuple[1], out.logits)


@pytest.mark.parametrize("tied", [True, False])
def test_language_model_loads_with_a_new_head(tied, tmp_path, caplog):
    language_model = build("fp_mamba1", tie_embeddings=tied)
    path = write_export(language_model, tmp_path / "lm", tokenizer=None, name="tiny", origin="")
    load = AutoModelForSequenceClassification.from_pretrained
    model, info = load(path, num_labels=2, output_loading_info=True)
    assert type(model) is FPRNNForSequenceClassification
    assert set(info["missing_keys"]) == {"score.weight"} and not info["unexpected_keys"]
    assert model.score.weight.shape == (2, 16)
    assert 0 < model.score.weight.abs().max() <= 16**-0.5
    expected = language_model.backbone.state_dict()
    for name, weight in model.backbone.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    model.save_pretrained(tmp_path / "saved")
    reloaded = load(tmp_path / "saved")
    assert reloaded.num_labels == 2 and torch.equal(reloaded.score.weight, model.score.weight)
    assert torch.equal(reloaded.eval()(make_ids()).logits, model.eval()(make_ids()).logits)


LOAD_SAVE_LOAD = """
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
ids = torch.tensor(json.loads(sys.argv[2]))
load = AutoModelForSequenceClassification.from_pretrained
model = load(sys.argv[1], num_labels=1, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
expected = model(ids).logits
model.save_pretrained(sys.argv[1] + "-saved")
again = load(sys.argv[1] + "-saved", trust_remote_code=True).eval()
assert type(again).__module__.startswith("transformers_modules"), type(again).__module__
torch.testing.assert_close(again(ids).logits, expected)
# The scored model's backbone is a language model's again, with a head of its own if it is tied.
back = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "-saved", trust_remote_code=True)
print(json.dumps([model.score.weight.tolist(), expected.tolist(), back(ids).logits.tolist()]))
"""


@pytest.mark.slow
def test_classifier_survives_remote_code_save_and_load(tmp_path):
    language_model = build("fp_mamba1").eval()
    path = write_export(language_model, tmp_path / "lm", tokenizer=None, name="tiny", origin="")
    (head, scores, logits), _ = elsewhere(
        LOAD_SAVE_LOAD, tmp_path, str(path), json.dumps(make_ids().tolist()), **warm_cache(tmp_path)
    )
    with torch.no_grad():
        hidden = language_model.backbone(make_ids()).last_hidden_state[:, -1]
        expected = language_model(make_ids()).logits
    torch.testing.assert_close(torch.tensor(scores), hidden @ torch.tensor(head).T)
    torch.testing.assert_close(torch.tensor(logits), expected)


@pytest.mark.slow
def test_trl_trains_a_reward_model(byte_tokenizer, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    language_model = build("fp_mamba1", vocab_size=max(VOCAB, len(tokenizer)))
    language_model.config.pad_token_id = tokenizer.pad_token_id
    path = write_export(language_model, tmp_path / "lm", byte_tokenizer, "tiny", "")
    pairs = datasets.Dataset.from_dict(
        {
            "prompt": ["one", "a longer one"] * 8,
            "chosen": [" good", " good"] * 8,
            "rejected": [" bad and more", " bad"] * 8,
        }
    )
    training = {"max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 3e-2}
    environment = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
    loading = {"trust_remote_code": True, "dtype": "float32"}
    arguments = trl.RewardConfig(
        str(tmp_path / "out"), logging_steps=1, model_init_kwargs=loading, **training, **environment
    )
    trainer = trl.RewardTrainer(
        str(path), args=arguments, train_dataset=pairs, processing_class=tokenizer
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.2 < losses[0]
    trainer.save_model(tmp_path / "saved")
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "saved", trust_remote_code=True
    ).eval()
    texts = ["one good", "one bad and more"]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    batch.pop("token_type_ids", None)
    good, bad = model(**batch).logits
    assert good > bad
