"""The trainer on tiny models: determinism, resuming, curricula, ℓmax, early stop."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lm.common.errors import BAD_CONFIG, ConfigError, Diverged
from lm.runs.checkpoint import CheckpointError, find_newest_checkpoint
from lm.runs.metrics import read_metrics
from lm.runs.run_dir import RunDirError
from synthetic import tasks
from synthetic.build import load_run
from synthetic.cli import main
from synthetic.evaluate import evaluate_run
from synthetic.results import describe_unfinished_curriculum
from synthetic.tasks import TaskError
from synthetic.train import Training, train
from synthetic.update import choose_max_iters
from tests.fabricated import TINY

TREE = {
    **TINY,
    "solver": {"max_iters": 10, "eval_max_iters": 10},
    "optim": {"lr": 1e-2, "warmup": 2},
    "train": {"steps": 12, "batch_size": 8, "length": 4},
    "eval": {"every": 4, "lengths": "2:6:2", "examples": 16, "batch_size": 8},
    "log": {"every": 1},
    "checkpoint": {"every": 4},
}


ITERATED = ("solver.token=iterate", "solver.schedule=parallel")


def read_losses(run_dir: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(run_dir) if "loss" in r]


def test_run_writes_metrics_and_result(make_cfg):
    c = make_cfg()
    result = train(c)
    assert len(read_losses(c.run_dir)) == 12
    valid = [r for r in read_metrics(c.run_dir) if "valid" in r]
    # Every 4 updates, except after the last (12), which the final evaluation follows.
    assert [r["step"] for r in valid] == [4, 8]
    saved = json.loads((c.run_dir / "result.json").read_text())
    assert saved == json.loads(json.dumps(result))
    assert [r["length"] for r in saved["eval"]] == [2, 4, 6]
    assert all(len(r["num_iters"]["mean"]) == len(r["failed"]) == 1 for r in saved["eval"])
    assert all(r["probed"] == 8 and r["stderr"]["num_iters"] >= 0 for r in saved["eval"])
    assert saved["updates"] == 12 and saved["chance"] == pytest.approx(1 / 3)


def test_rollback_counts_the_time_of_every_update_once(make_cfg, monkeypatch):
    """Each update takes a second. Update 6 diverges once, so updates 5 and 6 are made again."""
    clock, failures = [0.0], [6]
    real_update = Training.update

    def update(self):
        clock[0] += 1.0
        if self.step + 1 in failures:
            failures.clear()
            raise Diverged("the loss is nan")
        real_update(self)

    monkeypatch.setattr(Training, "update", update)
    monkeypatch.setattr("synthetic.train.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    c = make_cfg()
    assert train(c)["training_seconds"] == 14.0
    seconds = [r["seconds"] for r in read_metrics(c.run_dir) if "loss" in r]
    assert seconds == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("curriculum, longest", [((), 5), (("train.curriculum={start: 3}",), 3)])
def test_training_lengths_cover_the_configured_range(make_cfg, curriculum, longest):
    """The longest length is the upper end of train.length, or the curriculum's first length."""
    batches = Training(make_cfg("train.length=[2, 5]", *curriculum))._batches()
    lengths = {next(batches).input_ids.shape[1] for _ in range(60)}
    assert (min(lengths), max(lengths)) == (2, longest)


def test_batches_of_short_sequences_can_have_as_many_tokens_as_long_ones(make_cfg):
    curriculum = "train.curriculum={start: 2, grow: 3, constant_tokens: true}"
    training = Training(make_cfg("train.length=8", "train.batch_size=6", curriculum))
    shapes = []
    for longest in (2, 5, 8):
        training.longest = longest
        shapes.append(tuple(next(training._batches()).input_ids.shape))
    assert shapes == [(24, 2), (9, 5), (6, 8)]


def test_probes_are_periodic_and_do_not_change_training(make_cfg):
    train(make_cfg("name=never", "log.probe_every=0"))
    train(make_cfg("name=often", "log.probe_every=3"))
    never, often = (read_metrics(make_cfg(f"name={n}").run_dir) for n in ("never", "often"))
    assert [r["loss"] for r in never if "loss" in r] == [r["loss"] for r in often if "loss" in r]
    # Updates 4 and 8 are multiples of eval.every, not of probe_every.
    assert [r["step"] for r in often if "probe" in r] == [3, 6, 9, 12]
    assert not any("probe" in r for r in never)
    for record in (r["probe"] for r in often if "probe" in r):
        assert record["num_iters"]["max"][0] >= 1 and record["failed"] == [0]
    logged = [r for r in often if "loss" in r]
    assert all(r["evaluations"] and r["failed"] == [0] for r in logged)
    assert all(r["adjoint"] for r in logged)  # its norm, logged if the gradient is through time
    assert all("num_iters" not in r for r in logged)


def test_same_seed_gives_the_same_losses(make_cfg):
    train(make_cfg("name=a"))
    train(make_cfg("name=b"))
    train(make_cfg("name=c", "seed=1"))
    a, b, c = (read_losses(make_cfg(f"name={n}").run_dir) for n in "abc")
    assert a == b != c


def drop_times(result: dict) -> dict:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result["eval"]]
    return {**result, "eval": rows, "training_seconds": None}


@pytest.fixture
def babi(tmp_path):
    """Overrides for catbabi on files with 24 stories of two questions per split and bAbI task."""
    folder, rng = tmp_path / "babi", np.random.default_rng(0)
    folder.mkdir()
    for split in ("train", "valid", "test"):
        lines = []
        for _ in range(24):
            places = rng.choice(["office", "garden", "kitchen"], 2)
            for i, place in enumerate(places):
                lines.append(f"{2 * i + 1} Mary went to the {place}.")
                lines.append(f"{2 * i + 2} Where is Mary? \t{place}\t{2 * i + 1}")
        for number in range(1, 21):
            (folder / f"qa{number}_{split}.txt").write_text("\n".join(lines) + "\n")
    return (
        "task.name=catbabi",
        f"task.data={folder}",
        "task.stories=[1]",
        "train.length=10",
        "train.batch_size=4",
        "eval.batch_size=4",
    )


@pytest.mark.parametrize(
    "task, overrides",
    [
        ("word_problem", ("model.name=fprnn",)),
        ("word_problem", ("train.adversarial_noise=0.05", "solver.state_noise=0.2")),
        (
            "word_problem",
            ("train.curriculum={start: 4, min_accuracy: 0.0, num_elements: 2}", "eval.every=2"),
        ),
        (
            "word_problem",
            ("train.curriculum={start: 1, grow: 1, min_accuracy: 0.0, constant_tokens: true}",),
        ),
        ("catbabi", ("model.name=fprnn",)),
        ("catbabi", ("train.adversarial_noise=0.05",)),
        ("catbabi", ("model.name=lstm",)),
        (
            "catbabi",
            ("model.name=lstm", "solver.state_noise=0.2", "train.adversarial_noise=0.05"),
        ),
        ("catbabi", ("model.name=mamba",)),
        ("catbabi", ("model.name=transformer", "model.headdim=8")),
    ],
    ids=str,
)
def test_resume_after_kill_is_bit_identical(make_cfg, babi, monkeypatch, task, overrides):
    """The kill is in update 10, so the run resumes from the checkpoint of update 8.

    With catbabi the checkpoint also contains the recurrent state of the streams.
    """
    if task == "catbabi":
        overrides = (*overrides, *babi)
    uninterrupted = train(make_cfg("name=whole", *overrides))
    task_class = type(tasks.build_task(make_cfg(*overrides).task))
    original_batch = task_class.batch
    is_killed = False

    def die_once(self, seed, split, index, *rest):
        nonlocal is_killed
        if split == "train" and index == 9 and not is_killed:
            is_killed = True
            raise KeyboardInterrupt
        return original_batch(self, seed, split, index, *rest)

    monkeypatch.setattr(task_class, "batch", die_once)
    with pytest.raises(KeyboardInterrupt):
        train(make_cfg("name=killed", *overrides))
    resumed = train(make_cfg("name=killed", *overrides))
    losses = [read_losses(make_cfg(f"name={name}").run_dir) for name in ("whole", "killed")]
    assert losses[0] == losses[1]
    assert drop_times(resumed) == drop_times(uninterrupted)


def test_state_is_carried_across_segments(make_cfg, babi):
    """A model trained on segments of 24 tokens has the same accuracy on segments of 3 tokens.

    A fact and its question are then never in the same segment.
    """
    c = make_cfg(
        *babi,
        "train.length=24",
        "train.steps=150",
        "eval.every=500",
        "model.name=lstm",
        "model.d_model=32",
        "model.headdim=16",
        "checkpoint.every=200",
    )
    accuracy = train(c)["eval"][0]["metrics"]["accuracy"]
    assert accuracy > 0.9
    # A stream is evaluated in segments of train.length tokens.
    row = evaluate_run(c.run_dir, overrides=["train.length=3"])["eval"][0]
    assert row["length"] == 3 and row["metrics"]["accuracy"] == accuracy


def test_other_config_is_refused_and_finished_run_is_kept(make_cfg):
    train(make_cfg())
    with pytest.raises(RunDirError, match=r"another config .*task.group was 'Z3', is 'Z4'"):
        train(make_cfg("task.group=Z4"))
    with pytest.raises(RunDirError, match="already holds a run"):
        train(make_cfg("resume=never"))
    previous = read_losses(make_cfg().run_dir)
    train(make_cfg())  # only evaluates again
    assert read_losses(make_cfg().run_dir) == previous


def test_curriculum_grows_length_and_stops_when_solved(make_cfg):
    c = make_cfg(
        "task.group=Z1",  # a single element: every answer is correct
        "train.steps=80",
        "train.length=[1, 3]",
        "train.curriculum={start: 1, grow: 1}",
        "train.stop_at=1.0",
        "eval.every=2",
        "checkpoint.every=100",
    )
    result = train(c)
    longest = [r["longest"] for r in read_metrics(c.run_dir) if "loss" in r]
    # Each validation, after every second update, advances the curriculum or ends the training.
    assert longest == [1, 1, 2, 2, 3, 3] and result["solved_at"] == result["updates"] == 6
    again = train(c)
    assert again["solved_at"] == again["updates"] == 6


def test_unfinished_curriculum_is_noted(make_cfg, capsys):
    """Without the note, a model trained only on short sequences would look fully trained."""
    curriculum = "train.curriculum={start: 1, grow: 1, min_accuracy: 1.0}"
    c = make_cfg("task.group=A5", "train.length=3", "train.steps=2", "eval.every=1", curriculum)
    result = train(c)
    note = "its curriculum ended at length 1: it was never trained at 3"
    assert f"note: {note}" in capsys.readouterr().out and result["trained_length"] == 1
    assert describe_unfinished_curriculum(result, c) == note
    assert describe_unfinished_curriculum({**result, "trained_length": 3}, c) == ""
    few = describe_unfinished_curriculum({"trained_length": 3, "trained_elements": 2}, c)
    assert few == "its curriculum ended with 2 elements: it was never trained with all"
    del result["trained_length"]  # as in results of earlier versions
    assert describe_unfinished_curriculum(result, c) == ""


# From 2 of 6 elements and length 2 to train.length 4. A minimum of 0 advances the curriculum at
# every validation: first to length 4, then to 4 elements, then to all 6.
ELEMENTS = "train.curriculum={start: 2, grow: 2, min_accuracy: 0.0, num_elements: 2}"


def test_curriculum_adds_elements_at_full_length(make_cfg):
    overrides = ("task.group=S3", "eval.every=1", "train.steps=7", ELEMENTS)
    c = make_cfg(*overrides)
    train(c)
    valid = [r for r in read_metrics(c.run_dir) if "valid" in r]
    # "letters" is the number of elements; the key is absent if there are all.
    assert [r.get("letters") for r in valid] == [2, 2, 4, None, None, None]
    solvable = make_cfg(
        *overrides, "name=b", "train.length=1", "train.curriculum.start=1", "train.stop_at=0.01"
    )
    # Validations 1 and 2 lead to 4 and 6 elements: only validation 3 has all of them.
    assert train(solvable)["solved_at"] == 3


def test_final_evaluation_has_all_elements(make_cfg):
    unreachable = ELEMENTS.replace("min_accuracy: 0.0", "min_accuracy: 1.0")
    c = make_cfg("task.group=S3", "train.steps=2", "eval.every=1", unreachable, "eval.lengths=8")
    # The curriculum still has 2 elements, from which no length has disjoint splits.
    assert train(c)["eval"][0]["in_training"]["count"] == 0


def test_adversary_waits_for_the_end_of_the_curriculum(make_cfg):
    c = make_cfg(
        "task.group=S3", "train.adversarial_noise=0.1", "eval.every=1", ELEMENTS, "train.steps=7"
    )
    train(c)
    records = read_metrics(c.run_dir)
    assert [r["letters"] for r in records if "letters" in r] == [2, 2, 4]
    overlaps = [r["valid"]["in_training"]["count"] for r in records if "valid" in r]
    # Unknown as long as there are few elements, for which the splits are not disjoint.
    assert [count is None for count in overlaps] == [True] * 3 + [False] * 3
    adversarial = ["adversarial_loss" in r for r in records if "loss" in r]
    assert adversarial == [False] * 3 + [True] * 4


def test_iteration_limit_is_fixed_unlimited_or_random(make_cfg):
    assert choose_max_iters(make_cfg(), update=3) == 10  # solver.max_iters
    assert choose_max_iters(make_cfg("train.max_iters=7", *ITERATED), update=3) == 7
    assert choose_max_iters(make_cfg("train.max_iters=unlimited", *ITERATED), update=3) > 10**6
    random = make_cfg("train.max_iters=gamma", *ITERATED)
    values = np.array([choose_max_iters(random, update) for update in range(3000)])
    assert values.min() >= 1 and 4.3 < values.mean() < 4.7  # the mean of ⌈Γ(4, 1)⌉ is about 4.5
    assert [choose_max_iters(random, update) for update in range(50)] == list(values[:50])
    c = make_cfg("name=few", "train.max_iters=2", "train.steps=2", *ITERATED)
    train(c)
    # Two iterations, and one evaluation for the gradient.
    assert all(max(r["evaluations"]) <= 3 for r in read_metrics(c.run_dir) if "loss" in r)


@pytest.mark.parametrize("name", ["mamba", "lstm", "transformer", "gated_deltaproduct"])
def test_baselines_train(make_cfg, name):
    c = make_cfg(f"model.name={name}", "model.headdim=8", "train.steps=2")
    result = train(c)
    assert not {"num_iters", "probed", "failed"} & result["eval"][0].keys()
    assert result["model"] == name
    assert not any({"probe", "failed"} & r.keys() for r in read_metrics(c.run_dir))


ARITHMETIC = ("task.name=mod_arithmetic", "train.length=[3, 9]", "eval.lengths=5")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["train.curriculum={start: 2, num_elements: 9}"], "has only 3 elements"),
        (["task.name=parity", "train.curriculum={start: 2, num_elements: 2}"], "only word_problem"),
        (["train.adversarial_noise=-1"], "train.adversarial_noise"),
        (["train.adversarial_noise=0.1", "model.name=mamba"], "mamba has none: set it to 0"),
        (["task.name=mod_arithmetic", "train.length=4"], "1, 3, 5"),
        (["eval.seeds=[]"], "eval.seeds"),
        (["eval.seeds=[1,1]"], r"\[1, 1\] has a seed twice"),
        # Problems that would stop the run later are reported before it starts.
        ([*ARITHMETIC, "train.curriculum.start=4"], "no sequences of length 4"),
        (["task={name: copy, context: 20}", "train.length=[2,12]"], "needs a context of 27 tokens"),
        (
            ["thresholds=[{metric: token_accuracy, length: 7, min: 0.5}]"],
            r"does not include \(2, 4, 6\)",
        ),
        (
            ["thresholds=[{metric: nope, length: 4, min: 0.5}]"],
            "a threshold is on `nope`: word_problem has",
        ),
    ],
)
def test_bad_input_is_refused_before_training(make_cfg, tmp_path, overrides, message):
    with pytest.raises((ConfigError, TaskError), match=message):
        train(make_cfg(*overrides))
    assert not (tmp_path / "runs/t/metrics.jsonl").exists()


def test_train_and_eval_commands(make_cfg, tmp_path, capsys):
    c = make_cfg()
    yaml = str(tmp_path / "c.yaml")
    out = f"out_dir={tmp_path / 'runs'}"
    threshold = "thresholds=[{metric: token_accuracy, length: 4, min: 0.0}]"
    sequential = "solver.schedule=sequential"
    assert main(["train", "--config", yaml, out, "train.steps=2", threshold, sequential]) == 0
    output = capsys.readouterr().out
    assert "PASS  token_accuracy at length 4" in output and "ℓ* per" in output
    solver = "token exact, sequential"
    assert f"evaluation: {solver}" in " ".join(output.split())
    assert f"read at once; solver: {solver}" in " ".join(output.split())
    threshold = "thresholds=[{metric: sequence_accuracy, length: 6, min: 1.0}]"
    # Exit status 2: a threshold was missed.
    assert main(["train", "--config", yaml, out, "train.steps=2", "--overwrite", threshold]) == 2
    assert "FAIL  sequence_accuracy at length 6" in capsys.readouterr().out
    assert main(["eval", str(c.run_dir), "eval.lengths=3,5", "eval.seeds=[0, 1]"]) == 0
    rows = json.loads((c.run_dir / "eval.json").read_text())["eval"]
    assert [(r["length"], r["seed"]) for r in rows] == [(3, 0), (3, 1), (5, 0), (5, 1)]
    # A threshold at a length that was not evaluated neither passes nor fails.
    assert "FAIL" not in capsys.readouterr().out
    # A checkpoint works only with the vocabulary that it was trained on.
    assert main(["eval", str(c.run_dir), "task.group=Z5"]) == 1
    assert "are not for task `word_problem`, which has 5 ids" in capsys.readouterr().err
    # The second override keeps the shapes of the weights.
    for override in ("model.d_model=32", "model.contractive=0.5"):
        assert main(["eval", str(c.run_dir), override]) == 1
        assert "the overrides change the model of" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nothing")]) == BAD_CONFIG
    assert "no such folder" in capsys.readouterr().err
    checkpoint = find_newest_checkpoint(c.run_dir / "checkpoints") / "state.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    for command in (["eval", str(c.run_dir)], ["train", "--config", yaml, out, "train.steps=2"]):
        assert main(command) == 1
        captured = capsys.readouterr()
        assert "state.pt has 1000 bytes, not" in captured.out
        assert "has no complete checkpoint (damaged or incomplete: 1)" in captured.err


def test_sweep_without_job_index_is_refused(tmp_path, capsys):
    tree = {**TREE, "sweep": {"train.steps": [2, 3], "seed": [0, 1, 2]}}
    path = tmp_path / "sweep.yaml"
    path.write_text(json.dumps(tree))
    command = ["train", "--config", str(path), f"out_dir={tmp_path / 'runs'}"]
    assert main(command) == BAD_CONFIG
    assert "is a sweep: choose a point with --job-index 0 to 5" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    for point in ("0", "3"):
        assert main([*command, "--job-index", point]) == 0
    assert main([*command, "sweep={}", "name=alone", "train.steps=2"]) == 0


def test_fewer_steps_than_made_are_refused(make_cfg):
    train(make_cfg())
    with pytest.raises(CheckpointError, match=r"has made 12 updates, and train\.steps is only 8"):
        train(make_cfg("train.steps=8"))


def test_continued_run_is_not_finished(make_cfg, monkeypatch):
    c = make_cfg()
    train(c)
    monkeypatch.setattr("synthetic.train.evaluate_all", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(make_cfg("train.steps=14"))
    assert not (c.run_dir / "result.json").exists()


def test_later_evaluations_report_overlap_and_solver(make_cfg):
    c = make_cfg(
        "train.steps=6",
        "checkpoint.every=2",
        "eval.lengths=2,12",
        *ITERATED,
        "solver.stopping=causal",
    )
    rows = {r["length"]: r for r in train(c)["eval"]}
    assert rows[2]["in_training"] == {"count": 16, "of": 16}  # too few samples for disjoint splits
    assert rows[12]["in_training"] == {"count": 0, "of": 16}
    solver = {
        "token": "iterate",
        "schedule": "parallel",
        "stopping": "causal",
        "tol": 0.01,
        "max_iters": 10,
        "gradient": rows[2]["solver"]["gradient"],
    }
    assert {json.dumps(r["solver"]) for r in rows.values()} == {json.dumps(solver)}
    again = evaluate_run(c.run_dir, overrides=["eval.max_iters=3", "solver.schedule=window:2"])
    assert again["eval"][0]["in_training"] == {"count": 16, "of": 16}
    assert again["eval"][1]["solver"] == {**solver, "schedule": "window:2", "max_iters": 3}
    exact = evaluate_run(c.run_dir, overrides=["solver={token: exact, schedule: sequential}"])
    assert exact["eval"][0]["solver"]["tol"] is exact["eval"][0]["solver"]["max_iters"] is None
    # ℓ* does not depend on the solver, only "elsewhere" does: the share of tokens where the paper's
    # procedure, which ℓ* counts, ends in another solution than this solver.
    exact_iters, iterated_iters = exact["eval"][0]["num_iters"], again["eval"][0]["num_iters"]
    assert {**exact_iters, "elsewhere": iterated_iters["elsewhere"]} == iterated_iters
    # Z2 has other splits than Z3, on which the model was trained: the overlap is unknown.
    other = evaluate_run(c.run_dir, overrides=["task.group=Z2", "model.vocab_size=3"])
    assert {row["in_training"]["count"] for row in other["eval"]} == {None}


def test_stream_is_evaluated_once_in_segments(make_cfg, babi):
    result = train(
        make_cfg(*babi, "model.name=lstm", "model.headdim=8", "train.steps=1", "optim.warmup=0")
    )
    (row,) = result["eval"]
    assert (row["length"], row["seed"]) == (10, 0)  # eval.lengths and seeds do not apply
    assert (row["read"], row["solver"]) == ("in segments", "none")
    assert row["in_training"]["count"] is None


@pytest.mark.gpu
def test_a5_trains_in_bf16_on_gpu(make_cfg):
    overrides = ("task.group=A5", "model.d_model=64", "train.length=16", "train.steps=50")
    c = make_cfg("train.precision=bf16", *overrides)
    assert train(c)["updates"] == 50
    assert np.isfinite(read_losses(c.run_dir)).all()


def test_constant_tokens_are_refused_for_unsuitable_tasks(make_cfg, monkeypatch):
    overrides = "train.length=8", "train.curriculum={start: 2, constant_tokens: true}"
    with pytest.raises(TaskError, match="tokens at length 2 and"):
        Training(make_cfg("task={name: copy}", "eval.lengths=8", *overrides))
    monkeypatch.setattr("synthetic.tasks.word_problem.WordProblem.streams", True)
    with pytest.raises(TaskError, match="the same number of streams in every batch"):
        Training(make_cfg(*overrides))


def test_old_run_with_noise_that_no_layer_reads_still_loads(make_cfg):
    cfg = make_cfg("model={name: mamba, d_model: 16}", "solver.state_noise=0")
    train(cfg)
    path = cfg.run_dir / "config.yaml"
    text = path.read_text()
    assert "state_noise: 0.0" in text
    path.write_text(text.replace("state_noise: 0.0", "state_noise: 0.3"))
    assert load_run(cfg.run_dir).cfg.solver.state_noise == 0.3
