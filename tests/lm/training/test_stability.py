"""z-loss, skipped updates, the average of the weights: against formulas, resumed, refused."""

import json
import statistics

import pytest
import torch

from lm.common.errors import ConfigError
from lm.config.schema import check_updates
from lm.export.export import ExportError, export
from lm.model import modeling_fprnn
from lm.model.batch import IGNORED
from lm.runs.checkpoint import read_state
from lm.runs.metrics import Outliers, read_metrics
from lm.training.build import build_model
from lm.training.ema import Average
from lm.training.preflight import check_config
from lm.training.reshard import consolidated
from tests.running import printed_by_ranks, run


@pytest.fixture
def model(tiny):
    torch.manual_seed(0)
    return build_model(tiny(), 32).double()


def batch_of(*shape):
    ids = torch.randint(32, shape, generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1).masked_fill(torch.rand(shape) < 0.3, IGNORED)
    return ids, targets


@pytest.mark.parametrize("loss_only", [True, False])
def test_log_z_is_that_of_the_softmax_and_no_part_of_the_loss(model, loss_only, monkeypatch):
    """In chunks that cut rows, against a loop over the targets."""
    monkeypatch.setattr(modeling_fprnn, "LOSS_CHUNK_TOKENS", 7)
    ids, targets = batch_of(2, 12)
    ask = {"input_ids": ids, "shift_labels": targets, "loss_only": loss_only}
    found = model(**ask, log_z=True)
    logits = model(input_ids=ids).logits
    rows = [logits[i, t] for i, t in zip(*torch.where(targets != IGNORED))]
    expected = sum(row.exp().sum().log() ** 2 for row in rows) / len(rows)
    assert found.log_z.item() == pytest.approx(expected.item(), rel=1e-10)
    assert found.loss.item() == model(**ask).loss.item() and model(**ask).log_z is None
    head = model.lm_head.weight
    gradients = (torch.autograd.grad(value, head)[0] for value in (found.log_z, expected))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-12)


def test_log_z_needs_targets(model):
    with pytest.raises(ValueError, match="log_z needs labels"):
        model(input_ids=batch_of(1, 4)[0], log_z=True)


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_updates_with_z_loss_and_skipped_ones(processes):
    """In all ZeRO stages, with micro-batches of unequal numbers of targets. Of several ranks the
    last alone finds the second update an outlier."""
    for name, case in printed_by_ranks("tests.oracle_updates", processes).items():
        assert case["found"] == pytest.approx(case["expected"], rel=1e-5), name
        assert case["skipped"] == [False, True, False] and case["asked"] == [1, True], name
        for fact in ("unchanged", "moves again", "lr goes on", "same gradient"):
            assert case[fact], (name, fact)


def test_an_outlier_is_above_the_mean_by_so_many_deviations():
    values = [1.0, 2.0, 3.0, 2.0]
    limit = statistics.fmean(values) + 1.5 * statistics.pstdev(values)
    for last, is_one in ((limit + 1e-9, True), (limit - 1e-9, False), (-100.0, False)):
        outliers = Outliers(1.5, 4)
        for value in (50.0, *values):  # the first is forgotten
            outliers.look(loss=value, gradient_norm=0.0)
        why = outliers.look(loss=last, gradient_norm=0.0)
        assert bool(why) == is_one
    assert "gradient norm is 9.0000, more than 1.5 standard deviations of 0.0000" in (
        outliers.look(loss=2.0, gradient_norm=9.0)
    )


def test_no_update_is_an_outlier_before_the_window_is_full_and_a_new_level_is_taken():
    outliers = Outliers(2.0, 8)
    found = [outliers.look(loss=loss) for loss in [1.0, 500.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]]
    assert found == [None] * 8
    outliers.look(loss=1.0), outliers.look(loss=1.05)  # 500 has gone
    of_new_level = [outliers.look(loss=5.0) is None for _ in range(8)]
    assert of_new_level[0] is False and of_new_level[-1] is True
    again = Outliers(2.0, 8)
    again.load_state_dict(outliers.state_dict())
    values = (9.0, 5.1, 30.0)
    assert [again.look(loss=v) for v in values] == [outliers.look(loss=v) for v in values]
    assert Outliers().look(loss=float("inf")) is None  # train.skip: null


def test_the_average_of_the_weights_is_the_recursion():
    model = torch.nn.Linear(3, 2)
    average = Average(model, 0.9)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * (step + 1))
        average.update()
        expected = {n: 0.9 * expected[n] + 0.1 * p for n, p in model.named_parameters()}
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    with average.in_place():
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, expected[name])
    for name, p in model.named_parameters():
        assert torch.equal(p, own[name])
        torch.testing.assert_close(average.weights[name], expected[name])


EVERYTHING = ("train.z_loss=1e-2", "train.skip={sigma: 0.5, window: 2}", "train.ema=0.9",
              "checkpoint.keep=9", "checkpoint.every=1", "eval.every=4")  # fmt: skip


@pytest.fixture(scope="module")
def with_everything(tmp_path_factory):
    """(run directory, records of training) of a run in which update 4 is an outlier."""
    out = tmp_path_factory.mktemp("stability")
    records, _ = run(out, *EVERYTHING)
    return out / "tiny", records


def test_a_run_logs_and_keeps_what_each_did(with_everything):
    folder, records = with_everything
    assert all(0.2 < r["z_loss"] < 0.4 for r in records)  # 0.01 log² of about 300
    logged = read_metrics(folder)
    (skip,) = [r for r in logged if "skip" in r]
    assert skip["step"] == 4 and skip["skip"]["number"] == 1
    assert "the gradient norm is" in skip["skip"]["why"]
    assert [r["skipped"] for r in records] == [0, 0, 0, 1, 1, 1, 1, 1]
    weights, average = {}, {}
    for step in range(1, 9):
        path = folder / f"checkpoints/step-{step:06d}"
        weights[step] = consolidated(path)
        average[step] = read_state(path / "ema.pt")["weights"]
    for name, value in weights[3].items():
        assert torch.equal(value, weights[4][name])  # the one that was skipped
    assert any(not torch.equal(v, weights[5][n]) for n, v in weights[4].items())
    for step in range(2, 9):
        for name, before in average[step - 1].items():
            expected = 0.9 * before + 0.1 * weights[step][name]
            torch.testing.assert_close(average[step][name], expected, rtol=1e-5, atol=1e-7)
    result = json.loads((folder / "result.json").read_text())
    assert result["ema"]["loss"] != result["validation"]["loss"]
    assert [r["step"] for r in logged if "ema" in r] == [4, 8]


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_all_of_it_resumes_exactly(with_everything, tmp_path, stage):
    """From the update before the outlier, which only the records of those before it find; under
    another stage laid out anew."""
    folder, records = with_everything
    checkpoint = folder / "checkpoints/step-000003"
    again, _ = run(tmp_path, *EVERYTHING, f"resume={checkpoint}", f"engine.zero_stage={stage}")
    close = {"rel": 1e-5} if stage == 2 else {"rel": 0.0, "abs": 0.0}
    for one, other in zip(again, records[3:], strict=True):
        for key in ("loss", "grad_norm", "z_loss", "skipped"):
            assert one[key] == pytest.approx(other[key], **close), (key, one["step"])
    ours, theirs = (
        json.loads((path / "result.json").read_text()) for path in (tmp_path / "tiny", folder)
    )
    assert ours["ema"] == pytest.approx(theirs["ema"], **close)


def test_the_average_is_exported_where_there_is_one(with_everything, tiny_run, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, _ = with_everything
    export(folder, tmp_path / "hf", ema=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    average = read_state(folder / "checkpoints/step-000008/ema.pt")["weights"]
    found = dict(model.named_parameters())
    assert found.keys() == average.keys()
    for name, p in found.items():
        assert torch.equal(p, average[name]), name
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)
    assert "average, of decay 0.9" in (tmp_path / "hf" / "README.md").read_text()
    with pytest.raises(ExportError, match="has no average of the weights"):
        export(tiny_run, tmp_path / "other", ema=True)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (("train.ema=0.9", "engine.zero_stage=3"), "which no rank has under ZeRO-3"),
        (("train.ema=0.9", "engine.deepspeed={bf16: {enabled: true}}"), "sets bf16.enabled"),
        (("train.ema=1",), "`train.ema` is 1"),
        (("train.z_loss=-1",), "`train.z_loss` is -1"),
        (("train.skip={sigma: 0}",), "`train.skip.sigma` is 0"),
        (("train.skip={window: 1}",), "`train.skip.window` is 1"),
        (("train.skip=true",), "train.skip"),
    ],
)
def test_what_cannot_be_is_refused(tiny, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_config(tiny(*overrides), 1)


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_an_update_against_the_adversary_is_both_passes_by_hand(processes):
    """In all ZeRO stages, with micro-batches of unequal numbers of targets."""
    for stage, case in printed_by_ranks("tests.oracle_against", processes).items():
        assert case["found"] == pytest.approx(case["expected"], rel=1e-5), stage
        assert case["solves"] == [4 // processes] * 3, stage


def test_the_adversary_waits_for_the_end_of_the_curriculum(tmp_path):
    """Until then a run with one is the run without, to a bit."""
    mixture = {"s3": {"source": "traces", "weight": 1, "traces": {"documents": 400}}}
    settings = [
        "data.source=builtin", "data.path=null", f"data.mixture={json.dumps(mixture)}",
        'data.curriculum=[{"until": 3, "weights": {"s3": 1}}]', "data.val_tokens=300",
    ]  # fmt: skip
    (plain, _), (with_one, _) = (
        run(tmp_path / str(kappa), *settings, f"train.adversary={kappa}") for kappa in (0, 0.5)
    )
    same = [one["grad_norm"] == other["grad_norm"] for one, other in zip(plain, with_one)]
    assert same[:4] == [True, True, True, False]
    assert with_one[3]["loss"] == plain[3]["loss"], "the loss in the log is without it"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.name=mamba"], "which mamba has not: set it to 0"),
        (["model.gradient_checkpointing=true"], "leave out one of them"),
    ],
)
def test_an_adversary_that_cannot_work_is_refused(tiny, settings, said):
    with pytest.raises(ConfigError, match=said):
        tiny("train.adversary=0.05", *settings)


@pytest.mark.parametrize("stage, begins", [({}, False), ({"at": 0.9}, True), ({"until": 7}, True)])
def test_an_adversary_that_would_never_begin_is_refused(tiny, stage, begins):
    mixture = {"s3": {"source": "traces", "weight": 1}}
    stages = [{"until": 8, "weights": {"s3": 1}} | stage]
    cfg = tiny(
        "data.source=builtin", "data.path=null", f"data.mixture={json.dumps(mixture)}",
        f"data.curriculum={json.dumps(stages)}", "train.adversary=0.1",
    )  # fmt: skip
    if begins:
        check_updates(cfg)
    else:
        with pytest.raises(ConfigError, match=r"after update 8, and train\.steps is only 8"):
            check_updates(cfg)
