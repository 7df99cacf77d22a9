"""A run on a mixture resumes identically on one rank and on two."""

import json
from pathlib import Path

import pytest

from lm.data.corpus.prepare import open_corpus
from tests.lm.training.test_elastic import SETTINGS, assert_close, trace
from tests.running import ROOT, fprnn, run

SOURCES = {
    "facts": {"source": "jsonl", "path": str(ROOT / "tests/data/tiny.jsonl"), "weight": 0.7},
    "pages": {"source": "text", "path": "", "weight": 0.3},
}


def mixture_overrides(folder: Path, **data) -> list[str]:
    """Overrides of the tiny config for a mixture."""
    text = folder / "pages.txt"
    if not text.exists():
        text.write_text("\n\n".join(f"Page {i}: {'so it goes ' * (i % 17)}" for i in range(2000)))
    sources = SOURCES | {"pages": SOURCES["pages"] | {"path": str(text)}}
    keys = {"source": "builtin", "path": None, "mixture": sources, "val_tokens": 300, **data}
    return [*SETTINGS, *(f"data.{key}={json.dumps(value)}" for key, value in keys.items())]


@pytest.mark.slow
def test_mixture_resumes_on_one_and_two_ranks(tmp_path):
    overrides = mixture_overrides(tmp_path)
    whole, process = run(tmp_path / "whole", *overrides)
    assert "data     facts: 70.00% of the sequences" in process.stdout
    run_dir = tmp_path / "whole/tiny"
    shares = {r["step"]: (r["data_share"], r["data_epochs"]) for r in whole}
    for step, (share, epochs) in shares.items():
        assert sum(share.values()) == pytest.approx(1, abs=1e-5)
        sequences = share["facts"] * 4 * step
        assert sequences == pytest.approx(round(sequences), abs=1e-4), step
        assert epochs["facts"] > 0, step
    assert 0.5 < shares[8][0]["facts"] < 0.9
    expected, checkpoint = trace(whole), run_dir / "checkpoints/step-000004"
    for processes in (0, 2):
        out = tmp_path / f"again-{processes}"
        repeated, _ = run(out, *overrides, f"resume={checkpoint}", processes=processes)
        assert_close(repeated, expected, 4)
        if not processes:
            assert trace(repeated) == {step: expected[step] for step in range(5, 9)}  # bit for bit
        actual = {r["step"]: (r["data_share"], r["data_epochs"]) for r in repeated}
        assert actual == {step: shares[step] for step in range(5, 9)}
    result = json.loads((run_dir / "result.json").read_text())
    validation = result["validation"]
    assert validation["tokens"] == 2 * 300 and set(validation["sources"]) == set(SOURCES)
    mean = (
        0.7 * validation["sources"]["facts"]["loss"] + 0.3 * validation["sources"]["pages"]["loss"]
    )
    assert validation["loss"] == pytest.approx(mean, rel=1e-9)
    assert result["data_share"]
    assert len(open_corpus(run_dir, "pages").train)
    assert_other_weight_is_refused(tmp_path, overrides, checkpoint)


def assert_other_weight_is_refused(tmp_path, overrides, checkpoint):
    """The run's config refuses it; in another run the checkpoint's data position does."""
    command_line = ("train", "--config", "configs/tiny/lm.yaml", *overrides)
    other = "data.mixture.facts.weight=0.6"
    process = fprnn(*command_line, other, f"out_dir={tmp_path / 'whole'}", "resume=auto")
    assert "data.mixture.facts.weight was 0.7, is 0.6" in process.stderr
    process = fprnn(*command_line, other, f"out_dir={tmp_path / 'other'}", f"resume={checkpoint}")
    assert "data position in data.mixture.facts is of weight 0.7" in process.stderr, process.stderr
