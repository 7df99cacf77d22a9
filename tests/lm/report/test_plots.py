"""The figures of a run, from hand-made metrics."""

import json
import math
from pathlib import Path

import pytest

from lm.report import plots

PNG = b"\x89PNG\r\n\x1a\n"


def records(layers: int, steps: int = 200, every: int = 5) -> list[dict]:
    """A falling loss, `layers` layers of a solver (0: none) that is probed every 25 updates,
    validations and the two baselines."""
    made = []
    for step in range(every, steps + 1, every):
        loss = 2.5 + 5 * math.exp(-step / 80) + 0.1 * math.sin(step)
        made.append({"step": step, "loss": loss})
        if step % 50 == 0:
            made.append({"step": step, "validation": {"loss": loss + 0.1}})
        if layers and step % 25 == 0:  # a probe is of a validation, or has a record of its own
            mean = [3 + i / 2 + math.sin(step) / 3 for i in range(layers)]
            iters = {"mean": mean, "median": mean, "max": [m + 2 for m in mean]}
            probe = {"num_iters": iters}
            if step % 50 == 0:
                made[-1]["probe"] = probe
            else:
                made.append({"step": step, "probe": probe})
    made[-1]["baselines"] = {"unigram": 180.0, "bigram": 150.0}
    return made


def write(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """What is in each figure at the time it is saved: its axes and the labels of its legend."""
    from matplotlib.figure import Figure

    seen = {}
    save = Figure.savefig

    def savefig(figure, path, **options):
        save(figure, path, **options)
        legend = figure.legends[0]
        labels = [t.get_text() for t in legend.get_texts()]
        overlaps = legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())
        seen[Path(path).name] = (figure.axes[0], labels, overlaps)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return seen


@pytest.mark.parametrize("layers", [1, 2, 12])
def test_a_run_with_a_solver_leaves_two_figures(tmp_path, drawn, layers):
    run = write(tmp_path / "run", records(layers))
    paths = plots.draw(run)
    names = ["loss.png", "loss.pdf", "iterations.png", "iterations.pdf"]
    assert paths == [run / "figures" / name for name in names]
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(PNG if path.suffix == ".png" else b"%PDF")
        assert len(content) > 5000
    axes, labels, overlaps = drawn["loss.png"]
    assert labels == ["training", "mean of the last 3", "validation", "unigram", "bigram"]
    assert axes.get_xlabel() == "update" and "nats" in axes.get_ylabel()
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["validation"].get_xdata()) == [50, 100, 150, 200]
    assert lines["bigram"].get_ydata()[0] == pytest.approx(math.log(150))
    axes, labels, overlapping = drawn["iterations.png"]
    probed = list(range(25, 201, 25))
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [probed] * layers
    assert labels == [f"layer {i}" for i in range(layers)]
    assert not overlaps and not overlapping  # the legends lie beside the curves


def test_a_second_scale_has_bits_per_byte(tmp_path, drawn):
    """Of the validation text: 4 bytes a token, so 2 nats are 2 / ln 2 / 4 bits."""
    lines = records(layers=0)
    validation = lines[-1]["validation"]
    validation["bits_per_byte"] = validation["loss"] / math.log(2) / 4
    plots.draw(write(tmp_path / "run", lines))
    axes = drawn["loss.png"][0]
    (scale,) = axes.child_axes
    assert scale.get_ylabel() == "bits per byte of the validation text"
    assert scale.get_ylim() == pytest.approx([v / math.log(2) / 4 for v in axes.get_ylim()])
    validation["bits_per_byte"] = None
    plots.draw(write(tmp_path / "unknown", lines))
    assert not drawn["loss.png"][0].child_axes


def test_a_baseline_model_without_a_solver_leaves_only_the_loss(tmp_path):
    run = write(tmp_path / "run", records(layers=0))
    assert plots.draw(run) == [run / "figures/loss.png", run / "figures/loss.pdf"]
    assert {p.name for p in (run / "figures").iterdir()} == {"loss.png", "loss.pdf"}


def test_a_runs_name_is_no_mathematics(tmp_path):
    run = write(tmp_path / r"w$\fraz{$x", records(layers=1))
    assert len(plots.draw(run)) == 4


def test_a_run_without_validation_has_no_such_entry(tmp_path, drawn):
    plots.draw(write(tmp_path / "run", [{"step": 1, "loss": 2.0}]))
    assert drawn["loss.png"][1] == ["training"]


@pytest.mark.parametrize("lines", [[], [{"step": 4, "validation": {"loss": 1.0}}]])
def test_no_training_step_is_an_error(tmp_path, lines):
    run = write(tmp_path / "run", lines)
    with pytest.raises(plots.PlotError, match=r"run/metrics\.jsonl holds no training step"):
        plots.draw(run)
    assert not (run / "figures").exists()


def test_no_metrics_file_is_an_error(tmp_path):
    with pytest.raises(plots.PlotError, match="train first"):
        plots.draw(tmp_path)


def test_figures_are_closed(tmp_path):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    plots.draw(write(tmp_path / "run", records(layers=2)))
    assert plt.get_fignums() == before


def test_drawing_again_replaces_the_figures(tmp_path):
    run = write(tmp_path / "run", records(layers=2, steps=50))
    first = [p.read_bytes() for p in plots.draw(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records(2)))
    again = [p.read_bytes() for p in plots.draw(run)]
    assert all(a != b for a, b in zip(first, again))
