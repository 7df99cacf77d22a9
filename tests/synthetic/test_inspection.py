"""Inspection of synthetic runs: token names, typed sequences, answers, ℓ*, the command."""

import json

import numpy as np
import pytest
import torch

from lm.data.sources.groups import element_names, get_group
from lm.evaluation.inspection.page import render_page
from lm.runs.metrics import probe
from lm.runs.run_dir import RunDir
from synthetic import config, tasks
from synthetic.build import build_model, load_run
from synthetic.cli import main
from synthetic.inspection import inspect_batch
from synthetic.tasks import IGNORE, TaskError
from synthetic.train import train
from tests.fabricated import TINY


def build_task(name: str, **fields) -> tasks.Task:
    return tasks.build_task(config.Task(name=name, **fields))


@pytest.mark.parametrize(
    "name, fields",
    [
        ("word_problem", {"group": "A5"}),
        ("word_problem", {"group": "S3_x_Z4"}),
        ("parity", {}),
        ("automaton", {"supervision": "every"}),
    ],
)
def test_typed_sequences_have_the_same_labels_as_drawn_ones(name, fields):
    task = build_task(name, **fields)
    for seed in range(4):
        batch = task.batch(seed, "test", index=0, batch_size=1, lengths=(6, 6))
        names = [task.token_name(token_id) for token_id in batch.input_ids[0]]
        # Only names of one character may be typed without spaces.
        typed = task.parse_typed(names if name == "word_problem" else ["".join(names)])
        assert typed.mask is None
        assert np.array_equal(typed.input_ids, batch.input_ids), names
        assert np.array_equal(typed.labels, batch.labels), names


def test_element_names_multiply_as_permutations():
    for name, identity in {"S4": "1234", "A5": "12345", "D4": "1234"}.items():
        names, group = element_names(name), get_group(name)
        assert len(set(names)) == group.order and names[group.identity] == identity
        rng = np.random.default_rng(0)
        for i, j in rng.integers(group.order, size=(20, 2)):
            first, second = names[i], names[j]
            product = "".join(second[int(image) - 1] for image in first)
            assert names[group.table[i, j]] == product
    assert element_names("S3_x_Z4")[:5] == ["123,0", "123,1", "123,2", "123,3", "132,0"]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("word_problem", "213 999", "`999` is no token of the task: its tokens are 123, 132"),
        ("parity", "012", "`012` is no token of the task: its tokens are 0, 1"),
    ],
)
def test_unknown_tokens_are_refused(name, text, message):
    with pytest.raises(TaskError, match=message):
        build_task(name).parse_typed(text.split())


def test_tasks_without_typed_input_suggest_length_option():
    base_class = tasks.Task()  # has no `label_ids`, like a task of a user
    for task in (base_class, *map(build_task, ("copy", "mod_arithmetic", "dyck"))):
        with pytest.raises(TaskError, match="--length N draws one"):
            task.parse_typed(["x"])


def build_untrained(cfg: config.Config):
    """Return the untrained model of a run, in evaluation mode, and its task."""
    task = tasks.build_task(cfg.task)
    return build_model(cfg, task, max_length=16).model.eval(), task


def test_answers_losses_and_iterations_match_the_model():
    sizes = {"d_model": 16, "d_state": 4, "n_layer": 2}
    model, task = build_untrained(config.Config(name="u", model=sizes))
    batch = task.parse_typed(["213", "231 321", "123", "312"])
    inspection = inspect_batch(model, task, batch, "u")
    ids = torch.from_numpy(batch.input_ids)
    report = probe(model, ids)
    assert torch.equal(inspection.layers.iterations, report.token_iters[:, 0])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    labels = batch.labels[0].tolist()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="none")
    torch.testing.assert_close(inspection.loss, expected, rtol=1e-4, atol=1e-5)
    is_correct = (logits.argmax(-1) == torch.tensor(labels)).tolist()
    assert [answer.is_right for answer in inspection.answers] == is_correct
    assert [token.label for token in inspection.tokens] == ["213", "231", "321", "123", "312"]
    # First 213, then 231: 1 → 2 → 3, 2 → 1 → 2, 3 → 3 → 1.
    assert [answer.right for answer in inspection.answers][:2] == ["213", "321"]
    assert inspection.bits_per_byte is None and inspection.next_guesses == []
    text = render_page(inspection)
    classes = [part.split("'")[0] for part in text.split("<span class='token ")[1:]]
    assert classes == [f"answer {'right' if is_right else 'wrong'}" for is_right in is_correct]
    assert ("✗" in text.split("</section>")[0]) == (not all(is_correct))


def test_predictions_beyond_the_tasks_ids_have_names():
    """The model has eight ids, of which each token lists the likeliest five; Z2 has two."""
    cfg = config.Config(name="z", model={"vocab_size": 8}, task={"group": "Z2"})
    model, task = build_untrained(cfg)
    inspection = inspect_batch(model, task, task.parse_typed(["1 0"]), "z")
    for guess in (guess for row in inspection.guesses for guess in row):
        assert guess.label == (str(guess.id) if guess.id < 2 else f"<{guess.id}>")


def test_unlabelled_positions_are_neither_right_nor_wrong():
    model, task = build_untrained(config.Config(name="p", task={"name": "parity"}))
    inspection = inspect_batch(model, task, task.parse_typed(["0110"]), "p")
    assert [answer.is_right for answer in inspection.answers][:3] == [None] * 3
    assert inspection.answers[3].right == "0" and inspection.scored_count == 1
    assert task.parse_typed(["0110"]).labels[0].tolist() == [IGNORE] * 3 + [0]


def test_command_shows_a_trained_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(json.dumps({**TINY, "out_dir": str(tmp_path / "runs")}))
    train(config.load(tmp_path / "c.yaml"))
    run = str(tmp_path / "runs/t")
    capsys.readouterr()
    assert main(["inspect", run, "1", "2", "0"]) == 0
    output = capsys.readouterr().out
    assert f"page: {RunDir(run).path / 'inspect.html'}" in output
    _, task, model, _ = load_run(run)
    inspection = inspect_batch(model, task, task.parse_typed(["1 2 0"]), "t")
    cells = [
        f"{token.label}={answer.predicted}{'✓' if answer.is_right else '✗'}"
        for token, answer in zip(inspection.tokens, inspection.answers, strict=True)
    ]
    assert output.startswith(" ".join(cells))
    # Sums of 1, 2, 0 modulo 3: the task is Z3.
    assert [answer.right for answer in inspection.answers] == ["1", "0", "0"]
    assert main(["inspect", run, "--length", "6", "--out", "p.html"]) == 0
    assert "tokens: 6" in capsys.readouterr().out
    # No input, two inputs, an unknown token, and a sequence that is too long.
    for arguments in ([], ["1", "--length", "3"], ["4"], ["--length", "100000"]):
        assert main(["inspect", run, *arguments]) == 1
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1

    from lm.cli.main import main as lm_main

    assert lm_main(["inspect", run, "1"]) == 1
    assert f"`fprnn synthetic inspect {run}`" in capsys.readouterr().err
