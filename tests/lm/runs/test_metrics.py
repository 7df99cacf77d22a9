"""Metrics of a run: solver statistics, throughput, writers, and progress lines."""

import json
from types import SimpleNamespace

import pytest
import torch

from lm.config.schema import Config
from lm.model.batch import FixedPointReport
from lm.model.solver import FixedPointStats
from lm.runs import metrics
from lm.runs.log import TRACKERS, MetricsWriter, describe_record, flatten_record
from lm.runs.metrics import Throughput, fixed_point_metrics, measure_imbalance, read_metrics
from lm.runs.run_dir import RunDir


def make_report(evaluations, failed, residual, iterations=None) -> SimpleNamespace:
    """A FixedPointReport from lists of shape (n_layer, batch); no token has another fault."""
    fields = {"evaluations": evaluations, "failed": failed, "residual": residual}
    tensors = {name: torch.tensor(values) for name, values in fields.items()}
    no_tokens = torch.zeros_like(tensors["failed"])
    tensors |= dict.fromkeys(("bisected", "grad_limited", "other_solution"), no_tokens)
    num_iters = None if iterations is None else torch.tensor(iterations)
    return SimpleNamespace(**tensors, num_iters=num_iters, layers=None, adjoint_norm=None)


# Two layers, and three sequences in two micro-batches.
TRAINING_REPORTS = [
    make_report(
        evaluations=[[1.5, 2.5], [4.0, 6.0]],
        failed=[[0.0, 0.0], [0.0, 0.25]],
        residual=[[0.1, 0.3], [0.0, 0.9]],
    ),
    make_report(evaluations=[[5.0], [8.0]], failed=[[0.0], [0.5]], residual=[[0.2], [0.3]]),
]
PROBE_REPORT = make_report(
    evaluations=[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]],
    failed=[[0.0, 0.0, 0.3], [0.0, 0.0, 0.0]],
    residual=[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
    iterations=[[2, 4, 9], [10, 10, 10]],
)


def test_solver_metrics_are_per_layer_over_all_sequences():
    assert fixed_point_metrics([]) == {}  # a model without a solver
    assert fixed_point_metrics(TRAINING_REPORTS) == {
        "evaluations": [3, 6],
        "failed": [0, 0.25],
        "bisected": [0, 0],
        "limited": [0, 0],
        "residual": [0.2, 0.4],
    }
    assert fixed_point_metrics([PROBE_REPORT])["num_iters"] == {
        "mean": [5, 10],
        "median": [4, 10],
        "max": [9, 10],
        "elsewhere": [0, 0],
    }


def test_fixed_point_metrics_gather_over_ranks():
    def gather(t):  # the other rank has numbers three times as large
        return torch.cat([t, 3 * t], -1)

    gathered = fixed_point_metrics([PROBE_REPORT], gather)
    assert gathered["num_iters"]["mean"] == [10, 20]
    # Of an even number of values, `torch.median` returns the lower middle one.
    assert gathered["num_iters"]["median"] == [6, 10] and gathered["num_iters"]["max"] == [27, 30]
    assert fixed_point_metrics(TRAINING_REPORTS, gather)["residual"] == [0.4, 0.8]


def test_padding_sequences_do_not_count():
    rows = torch.tensor([True, True, False])
    measured = fixed_point_metrics([PROBE_REPORT], rows=rows)
    assert measured["num_iters"]["max"] == [4, 10] and measured["failed"] == [0, 0]

    def gather(t):  # of three sequences of the other rank, the first counts
        other = torch.tensor([1.0, 0.0, 0.0]) if t.ndim == 1 else 10 * t
        return torch.cat([t, other], -1)

    measured = fixed_point_metrics([PROBE_REPORT], gather, rows)
    num_iters = measured["num_iters"]  # of 2, 4, 20 and of 10, 10, 100
    assert num_iters["mean"] == [8.66667, 40]
    assert num_iters["median"] == [4, 10] and num_iters["max"] == [20, 100]


@pytest.mark.parametrize(
    "norms, adjoint",
    [
        ([torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.25])], [2.0, 1.0]),
        ([torch.zeros(2), torch.zeros(2)], None),  # no backward pass through time
        (None, None),
    ],
)
def test_adjoint_is_the_maximum_per_layer(norms, adjoint):
    ones = torch.ones(2, 2)
    fields = dict.fromkeys(FixedPointStats._fields)
    fields |= dict.fromkeys(("evaluations", "failed", "bisected", "grad_limited", "residual"), ones)
    report = FixedPointReport((fields | {"adjoint_norm": norms}).values())
    assert fixed_point_metrics([report]).get("adjoint") == adjoint


EXACT = {"token": "exact", "schedule": "sequential", "tol": None, "max_iters": None}


def test_unsolved_tokens_warn_once_per_layer(messages):
    watch = metrics.FailureWatch(EXACT)
    watch.check({}, "update 0")
    watch.check({"failed": [0.0, metrics.FAILED_SHARE]}, "update 1")
    assert messages == []
    watch.check({"failed": [0.0, 0.023]}, "update 2")
    watch.check({"failed": [0.0, 0.5]}, "update 3")
    watch.check({"failed": [0.1, 0.5]}, "update 4")
    assert len(messages) == 2
    assert messages[0].startswith(
        "warning: update 2: the token's equation was not solved for 2.30% of the tokens of layer 1"
    )
    assert "model.contractive: 0.9" in messages[0]
    assert "model.mixer_gate_init_bias: -3" in messages[0]
    assert "10.00% of the tokens of layer 0" in messages[1]
    metrics.FailureWatch(EXACT).check({"failed": [0.5], "layers": [3]}, "update 1")
    assert "of the tokens of layer 3 " in messages[2]  # a hybrid


@pytest.mark.parametrize("name,words", [("bisected", "bisected"), ("limited", "nearly singular")])
def test_ill_conditioned_tokens_warn(name, words):
    message = metrics.find_failures({"failed": [0.0, 0.0], name: [metrics.ILL_SHARE, 0.16]}, EXACT)
    assert list(message) == [1]  # the share of layer 0 is not above the limit
    assert words in message[1] and "16.00% of the tokens of layer 1" in message[1]
    both = metrics.find_failures({"failed": [0.5], name: [0.5]}, EXACT)
    assert "was not solved" in both[0]


def test_iteration_count_of_another_solution_is_marked():
    num_iters = {"mean": [53.9, 7.0], "elsewhere": [0.85, metrics.OTHER_SOLUTION_SHARE]}
    assert metrics.find_other_solutions(num_iters) == [True, False]
    assert metrics.format_marked_iterations(num_iters) == ["53.9†", "7.0"]
    assert metrics.format_marked_iterations({"mean": [53.9]}) == ["53.9"]  # a record of version 0.1


@pytest.mark.parametrize("solver", [{**EXACT, "token": "iterate"}, "none", "unknown"])
def test_unfinished_tokens_of_paper_procedure_do_not_warn(solver):
    assert metrics.find_failures({"failed": [0.5], "bisected": [0.5]}, solver) == {}


def make_model(**solver):
    from lm.training.build import build_model

    cfg = Config(model={"d_model": 16, "n_layer": 3, "d_state": 4}, solver=solver)
    return build_model(cfg, 16)


IDS = torch.arange(10).reshape(2, 5)


def test_probe_restores_the_mode_of_the_model():
    torch.manual_seed(0)
    model = make_model()
    for mode in (True, False):
        model.train(mode)
        report = metrics.probe(model, IDS)
        assert model.training is mode and not report.evaluations.requires_grad
    assert model(input_ids=IDS).fixed_point.num_iters is None


def test_fixed_point_metrics_of_a_real_model():
    torch.manual_seed(0)
    model = make_model(schedule="sequential").train()
    output = model(input_ids=IDS, labels=IDS)
    measured = fixed_point_metrics([output.fixed_point])
    assert measured.keys() == {"evaluations", "failed", "bisected", "limited", "residual"}
    assert measured["evaluations"] == [1, 1, 1] and measured["failed"] == [0, 0, 0]
    output.loss.backward()
    adjoint = fixed_point_metrics([output.fixed_point])["adjoint"]
    assert len(adjoint) == 3 and all(norm > 0 for norm in adjoint)


# Throughput and MFU.


@pytest.fixture
def clock(monkeypatch):
    """Clocks that tests advance: `seconds`, and `processor` seconds."""
    times = SimpleNamespace(seconds=100.0, processor=7.0)
    clocks = {"perf_counter": lambda: times.seconds, "process_time": lambda: times.processor}
    monkeypatch.setattr(metrics, "time", SimpleNamespace(**clocks))
    return times


def test_throughput_and_mfu_are_per_second_of_training(monkeypatch, clock):
    gib = 2**30
    gpus = [
        ("NVIDIA H100 80GB HBM3", 79 * gib, 989e12),
        ("NVIDIA L40S", 44 * gib, 362e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * gib, None),
        ("Some GPU", 79 * gib, None),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, memory, peak in gpus:
        device = SimpleNamespace(name=name, total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, device=device: device)
        assert metrics.peak_flops() == peak
    monkeypatch.setattr(metrics, "peak_flops", lambda: 1e6)
    speed = Throughput(lambda evaluations: 100 * evaluations, world_size=2)
    clock.seconds += 2
    clock.processor += 3
    speed.count(5000)
    # 2,500 tokens/s × 400 FLOPs on two devices of 1e6 FLOP/s.
    read = speed.read(4.0)
    assert read.pop("spent") == {"seconds": 2.0, "processor_seconds": 3.0}
    assert read == {"tokens_per_s": 2500.0, "mfu": 0.5}
    clock.seconds += 3
    clock.processor += 1
    speed.count(30)
    read = speed.read(0.0)
    assert read.pop("spent") == {"seconds": 5.0, "processor_seconds": 4.0}  # of the whole run
    assert read == {"tokens_per_s": 10.0, "mfu": 0.0}  # since the last reading
    clock.seconds += 2
    speed.count(5000, passes=2)
    read = speed.read(2.0)  # as 4 evaluations in one pass
    assert (read["tokens_per_s"], read["mfu"]) == (2500.0, 0.5)


def test_skipped_time_does_not_count(monkeypatch, clock):
    monkeypatch.setattr(metrics, "peak_flops", lambda: None)
    speed = Throughput(lambda evaluations: 1, world_size=1)
    clock.seconds += 50
    speed.skip()
    for _ in range(2):
        clock.seconds += 4
        speed.count(100)
        clock.seconds += 1000  # a validation
        speed.skip()
    spent = {"seconds": 8.0, "processor_seconds": 0.0}
    assert speed.read(1.0) == {"tokens_per_s": 25.0, "spent": spent}  # no peak, no MFU


# Writers.


def make_record(step: int) -> dict:
    iterations = {"num_iters": {"mean": [1.5, 2.5]}}
    return {"step": step, "loss": 1 / step, "probe": iterations, "note": "text"}


def test_jsonl_is_on_disk_after_every_write(tmp_path):
    writer = MetricsWriter(Config(), RunDir(tmp_path))
    for step in (1, 2):
        writer.write(make_record(step))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [make_record(s) for s in range(1, step + 1)]
    writer.close()
    assert read_metrics(tmp_path) == [make_record(1), make_record(2)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]  # neither wandb nor a .tmp


def test_resume_drops_records_after_the_checkpoint(tmp_path):
    assert read_metrics(tmp_path) == []
    writer = MetricsWriter(Config(), RunDir(tmp_path))
    for step in (1, 2, 3, 4):
        writer.write(make_record(step))
    writer.close()
    writer = MetricsWriter(Config(), RunDir(tmp_path), resumed_at=2)
    assert read_metrics(tmp_path) == [make_record(1), make_record(2)]
    writer.write({"step": 3, "loss": 9.0})
    writer.close()
    assert read_metrics(tmp_path) == [make_record(1), make_record(2), {"step": 3, "loss": 9.0}]
    MetricsWriter(Config(), RunDir(tmp_path)).close()  # a new run starts a new file
    assert read_metrics(tmp_path) == []


def test_damaged_lines_are_dropped_with_a_note(tmp_path, capsys):
    log = tmp_path / "metrics.jsonl"
    log.write_text(
        f'{json.dumps(make_record(1))}\n{{"step": 2, "lo\0\n{json.dumps(make_record(2))[:-3]}'
    )
    assert read_metrics(tmp_path) == [make_record(1)]
    writer = MetricsWriter(Config(), RunDir(tmp_path), resumed_at=2)
    message = " ".join(capsys.readouterr().out.split())
    assert f"note: {log}: dropped 2 lines without a record (cut short by a kill" in message
    writer.write(make_record(3))
    writer.close()
    assert read_metrics(tmp_path) == [make_record(1), make_record(3)]


def test_tensorboard_drops_records_after_a_rollback(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(Config(log={"tensorboard": True}), RunDir(tmp_path))
    write_with_rollback(writer)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert losses == [(step, 1.0 if step <= 6 else 2.0) for step in range(1, 16)]


def write_with_rollback(writer):
    """Write updates 1 to 12, roll back to 6, and write 7 to 15 with another loss."""
    for step in range(1, 13):
        writer.write({"step": step, "loss": 1.0})
    writer.drop_records_after(6)
    for step in range(7, 16):
        writer.write({"step": step, "loss": 2.0})
    writer.close()


def test_tracker_names_are_grouped():
    """A training record, a validation of a hybrid with a probe, and a synthetic validation."""
    assert flatten_record(
        {
            "step": 3,
            "loss": 2.0,
            "lr": 0.1,
            "tokens_per_s": 9.0,
            "spent": {"seconds": 4.0},
            "breakdown": {"data": 0.5},
            "failed": [0.0, 0.25],
            "layers": [1, 3],
            "anything_new": 7,
            "data_share": {"web": 0.5},
            "z": "text",
        }
    ) == {
        "train/loss": 2.0,
        "train/lr": 0.1,
        "time/tokens_per_s": 9.0,
        "time/spent/seconds": 4.0,
        "time/breakdown/data": 0.5,
        "solver/failed/layer1": 0.0,
        "solver/failed/layer3": 0.25,
        "train/anything_new": 7,
        "data/data_share/web": 0.5,
    }
    assert flatten_record(
        {
            "step": 3,
            "validation": {"loss": 2.0, "sources": {"web": {"loss": 1.0}}, "bytes": None},
            "probe": {"failed": [0.5], "num_iters": {"max": [9]}, "layers": [2]},
        }
    ) == {
        "validation/loss": 2.0,
        "validation/sources/web/loss": 1.0,
        "solver/probe/failed/layer2": 0.5,
        "solver/probe/num_iters/max/layer2": 9,
    }
    synthetic_validation = {
        "step": 1,
        "valid": {"metrics": {"acc": 0.5}, "failed": [0.25]},
        "seconds": 2.0,
    }
    assert flatten_record(synthetic_validation) == {
        "validation/metrics/acc": 0.5,
        "validation/failed/layer0": 0.25,
        "time/seconds": 2.0,
    }


@pytest.mark.parametrize("fault", ["init", "log", "close"])
def test_failing_tracker_warns_once_and_is_dropped(tmp_path, monkeypatch, capsys, fault):
    logged = []

    class Failing:
        def __init__(self, *_):
            self._fail_at("init")

        def log(self, step, numbers):
            self._fail_at("log")

        def close(self):
            self._fail_at("close")

        def _fail_at(self, method):
            if method == fault:
                raise ConnectionError("the server is gone")

    class Working:
        def __init__(self, *_): ...

        def log(self, step, numbers):
            logged.append((step, numbers))

        def close(self):
            logged.append("closed")

    monkeypatch.setitem(TRACKERS, "wandb", Failing)
    monkeypatch.setitem(TRACKERS, "tensorboard", Working)
    writer = MetricsWriter(Config(log={"wandb": True, "tensorboard": True}), RunDir(tmp_path))
    for step in (1, 2):
        writer.write({"step": step, "loss": 1.0})
    writer.close()
    message = " ".join(capsys.readouterr().out.split())
    assert message.count("warning") == 1
    assert message.startswith("warning: log.wandb has failed (ConnectionError: the server is gone)")
    assert logged == [(1, {"train/loss": 1.0}), (2, {"train/loss": 1.0}), "closed"]
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_wandb_continues_after_a_rollback(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = MetricsWriter(Config(name="offline", log={"wandb": True}), RunDir(tmp_path))
    session = writer.trackers["wandb"].run
    rows, real_log = [], session.log
    monkeypatch.setattr(session, "log", lambda row: (rows.append(row), real_log(row)))
    write_with_rollback(writer)
    # The last record of a step counts.
    loss_by_step = {row["global_step"]: row["train/loss"] for row in rows}
    assert loss_by_step == {step: 1.0 if step <= 6 else 2.0 for step in range(1, 16)}
    assert session.config["model"]
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 16))


# Progress.


def test_terminal_line_labels_its_numbers():
    record = {
        "loss": 2.0,
        "perplexity": 7.389,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_s": 12345.6,
    }
    line = describe_record(record)
    assert line == "loss 2.000  perplexity 7.4  lr 1.0e-03  |g| 0.50  12,346 tokens/s"
    solver_record = record | {"evaluations": [1.0, 1.5], "failed": [0.0, 0.01], "mfu": 0.312}
    assert describe_record(solver_record, {"mean": [8.62, 4.1]}).endswith(
        "|g| 0.50  ℓ* 8.6 4.1  evaluations 1.0 1.5  failed 1.00%  12,346 tokens/s  MFU 31.2%"
    )
    eight_layers = {"mean": [float(i) for i in range(1, 9)]}
    assert "ℓ* 4.5 (1.0 to 8.0)" in describe_record(record, eight_layers)


def test_imbalance_is_the_mean_waiting_share():
    def gather(seconds):  # the other ranks took 1 and 4 seconds
        return torch.cat([seconds, torch.tensor([1.0, 4.0], dtype=torch.float64)])

    assert measure_imbalance(1.0, gather) == {"imbalance": 0.5}  # 1 − mean 2 / maximum 4
    assert measure_imbalance(4.0, gather) == {"imbalance": 0.25}  # 1 − mean 3 / maximum 4
    assert measure_imbalance(3.0, lambda t: t) == {}  # a single rank
