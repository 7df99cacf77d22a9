"""A run on a mixture resumes identically on one rank and on two."""

import json
from pathlib import Path

import pytest

from lm.data.corpus.prepare import open_corpus
from tests.lm.training.test_elastic import SETTINGS, assert_close, trace
from tests.lm.training.test_recovery import TINY
from tests.running import ROOT, fprnn, run

SOURCES = {
    "facts": {"source": "jsonl", "path": str(ROOT / "tests/data/tiny.jsonl"), "weight": 0.7},
    "pages": {"source": "text", "path": "", "weight": 0.3},
}


def mixture_overrides(folder: Path, **data) -> list[str]:
    """Return overrides of the tiny config for a mixture; write one of its sources to `folder`."""
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
    source_metrics = {r["step"]: (r["data_share"], r["data_epochs"]) for r in whole}
    for step, (shares, epochs) in source_metrics.items():
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
        sequences = shares["facts"] * 4 * step  # 4 sequences per update: a whole number
        assert sequences == pytest.approx(round(sequences), abs=1e-4), step
        assert epochs["facts"] > 0, step
    assert 0.5 < shares["facts"] < 0.9  # after the last update; the weight is 0.7
    expected, checkpoint = trace(whole), run_dir / "checkpoints/step-000004"
    for processes in (0, 2):
        out = tmp_path / f"again-{processes}"
        repeated, _ = run(out, *overrides, f"resume={checkpoint}", processes=processes)
        assert_close(repeated, expected, after=4)
        if not processes:  # one rank, as in the whole run: bit for bit
            assert trace(repeated) == {step: expected[step] for step in range(5, 9)}
        actual = {r["step"]: (r["data_share"], r["data_epochs"]) for r in repeated}
        assert actual == {step: source_metrics[step] for step in range(5, 9)}
    result = json.loads((run_dir / "result.json").read_text())
    validation = result["validation"]
    # data.val_tokens holds for each of the two sources.
    assert validation["tokens"] == 2 * 300 and set(validation["sources"]) == set(SOURCES)
    losses = {name: scores["loss"] for name, scores in validation["sources"].items()}
    mean = 0.7 * losses["facts"] + 0.3 * losses["pages"]
    assert validation["loss"] == pytest.approx(mean, rel=1e-9)
    assert result["data_share"]
    assert len(open_corpus(run_dir, "pages").train)
    assert_other_weight_is_refused(tmp_path, overrides, checkpoint)


def assert_other_weight_is_refused(tmp_path, overrides, checkpoint):
    """The run's config refuses it; in another run the checkpoint's data position does."""
    command_line = (*TINY, *overrides, "data.mixture.facts.weight=0.6")
    process = fprnn(*command_line, f"out_dir={tmp_path / 'whole'}", "resume=auto")
    assert "data.mixture.facts.weight was 0.7, is 0.6" in process.stderr
    process = fprnn(*command_line, f"out_dir={tmp_path / 'other'}", f"resume={checkpoint}")
    message = process.stderr
    assert "data position" in message and "data.mixture.facts: weight 0.7" in message, message
