"""Paths that cannot be written, and damaged runs and exports: each is refused in a sentence."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.cli.main import main
from lm.common.errors import BAD_CONFIG, FAILED, describe_user_error, exit_status
from lm.common.files import (
    CONTROL,
    OutputError,
    check_file,
    check_folder,
    lock_folder,
    write_text,
    writing,
)
from lm.export.export import write_export
from lm.model.checksums import SUMS
from lm.runs.exported import LoadError, load_model, load_tokenizer
from tests.refusals import refused

TINY = Path(__file__).parents[3] / "configs/tiny/lm.yaml"
WEIGHT = "backbone.layers.0.block.in_proj.weight"


@pytest.fixture
def copy(small_export, tmp_path):
    """Return a copy of an export without checksums, which tests may damage."""
    ignore = shutil.ignore_patterns(SUMS)
    return Path(shutil.copytree(small_export, tmp_path / "copy", ignore=ignore))


# Paths that cannot be written. Root ignores permissions, but cannot write below a file or in /proc.


@pytest.fixture
def blocked(tmp_path):
    """Return a path below a file."""
    (tmp_path / "file").write_text("x")
    return tmp_path / "file" / "below"


def test_checks_of_paths_leave_no_trace(tmp_path):
    check_folder(tmp_path / "a" / "b")
    check_file(tmp_path / "a" / "b.json")
    (tmp_path / "existing.json").write_text("unchanged")
    check_file(tmp_path / "existing.json")
    assert (tmp_path / "existing.json").read_text() == "unchanged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["existing.json"]


def test_checks_refuse_impossible_paths(tmp_path, blocked):
    for path in (blocked, blocked / "deeper"):
        with pytest.raises(OutputError, match=r"cannot be a folder to write to: .*file is a file"):
            check_folder(path)
    with pytest.raises(OutputError, match="is a folder: name a file in it"):
        check_file(tmp_path)
    disk_full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutputError, match="json cannot be written: No space"), writing("x.json"):
        raise disk_full


@pytest.mark.parametrize(
    "code, status", [(errno.EACCES, BAD_CONFIG), (errno.EROFS, BAD_CONFIG), (errno.ENOSPC, FAILED)]
)
def test_exit_status_of_a_wrong_path_differs_from_a_full_disk(code, status):
    error = OSError(code, os.strerror(code), "a")
    assert exit_status(error) == status
    assert describe_user_error(error) == f"a: {os.strerror(code)}"
    with pytest.raises(OutputError, match="a cannot be written") as caught, writing("a"):
        raise error
    assert exit_status(caught.value) == status


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_unwritable_path_is_refused_even_for_root():
    with pytest.raises(OutputError, match="/proc/fprnn/a cannot be written"):
        check_folder("/proc/fprnn/a")


def test_links_and_devices_are_written_through(tmp_path):
    """They are not replaced by a regular file."""
    (tmp_path / "existing").write_text("old")
    for name, target in (("link", "existing"), ("dangling", "new"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling"):
        check_file(tmp_path / name)
        write_text(tmp_path / name, name)
        assert (tmp_path / name).is_symlink() and (tmp_path / name).read_text() == name
    for write in (check_file, lambda path: write_text(path, "x")):
        with pytest.raises(OutputError, match="loop cannot be written: Too many levels"):
            write(tmp_path / "loop")
    check_file(tmp_path / "pipe")  # does not wait, although there is no reader yet
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert Path("/dev/full").is_char_device()
    with pytest.raises(OutputError, match="/dev/full cannot be written: No space left on device"):
        write_text(Path("/dev/full"), "a")
    assert Path("/dev/full").is_char_device()


def test_export_through_a_link_and_after_a_killed_export(tmp_path, small_export):
    model, real = load_model(small_export), tmp_path / "real"
    real.mkdir()
    (tmp_path / "out").symlink_to("real")
    for _ in ("create the export", "replace it"):
        write_export(model, tmp_path / "out", small_export, "x", "")
    assert (tmp_path / "out").is_symlink() and (real / "config.json").is_file()
    # Temporary folders of an export that was killed, and of an export that runs: it holds the lock.
    abandoned, busy = tmp_path / ".real-killed00", tmp_path / ".real-busy0000"
    for folder in (abandoned, busy):
        (folder / "export").mkdir(parents=True)
    with lock_folder(busy):
        write_export(model, tmp_path / "out", small_export, "x", "")
    assert not abandoned.exists() and busy.exists()


LONG = "a" * 300  # a file name may have 255 bytes


def test_too_long_file_name_is_refused(capsys, tiny, tmp_path, small_export):
    from lm.runs.run_dir import RunDir

    for check in (check_folder, check_file):
        for path in (tmp_path / LONG, tmp_path / LONG / "below"):
            with pytest.raises(OutputError, match="cannot be written: File name too long"):
                check(path)
    with pytest.raises(OutputError, match="File name too long"):
        cfg = tiny(f"name={LONG}")
        RunDir(cfg.run_dir).claim(cfg, False)
    with pytest.raises(OutputError, match="File name too long"):
        write_export(None, tmp_path / LONG, None, "x", "")
    train = ["train", "--config", TINY, "--dry-run", f"out_dir={tmp_path}", f"name={LONG}"]
    inspect = ["inspect", small_export, "a", "--out", tmp_path / LONG]
    for command in (train, inspect):
        assert "cannot be written: File name too long" in refused(capsys, *command)
    assert list(tmp_path.iterdir()) == []


def test_eval_to_an_unwritable_path_is_refused(capsys, small_export, blocked):
    pytest.importorskip("lm_eval")
    task = "--tasks", "catbabi_mini"
    assert "is a file" in refused(capsys, "eval", small_export, *task, "--out", blocked / "x")


def test_export_to_an_unwritable_path_is_refused(capsys, tmp_path, blocked, byte_tokenizer):
    (tmp_path / "config.yaml").write_text("name: x")
    assert "is a file" in refused(capsys, "export", tmp_path, blocked)
    assert "is a file" in refused(capsys, "export", tmp_path, blocked.parent)
    with pytest.raises(OutputError, match="is a file"):
        write_export(None, blocked, byte_tokenizer, "x", "")


def test_report_in_an_unwritable_path_is_refused(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text("name: x")
    (tmp_path / "figures").write_text("x")
    message = refused(capsys, "report", tmp_path)
    assert "figures cannot be a folder to write to: it is a file" in message


# Damaged runs and exports


def change_weights(folder: Path, change) -> None:
    """Call `change` on the weights of an export, and save them."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


# Name → function that damages the weights, and the words of the message.
DAMAGES = {
    "missing": (lambda w: w.pop(WEIGHT), f"1 weight missing ({WEIGHT})"),
    "extra": (
        lambda w: w.update({"backbone.extra": torch.zeros(2)}),
        "1 weight unknown to the model (backbone.extra)",
    ),
    "shape": (
        lambda w: w.update({WEIGHT: torch.zeros(5, 5)}),
        f"1 weight of another shape than config.json says ({WEIGHT} [5, 5], not [64, 16])",
    ),
    "nan": (lambda w: w[WEIGHT].fill_(float("nan")), f"1 weight NaN or infinite ({WEIGHT})"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_contradict_the_config_are_refused(capsys, copy, damage):
    change, words = DAMAGES[damage]
    change_weights(copy, change)
    assert words in refused(capsys, "generate", copy, "--prompt", "a")


# An empty file, a part of the first 8 bytes (the header's length), and all but the last bytes.
@pytest.mark.parametrize("end", [0, 7, -1000])
def test_truncated_weights_are_refused(copy, end):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(LoadError, match=r"the weights in .* are cut short or damaged"):
        load_model(copy)


def test_complete_export_loads_without_messages(capsys, small_export):
    model = load_model(small_export)
    saved = load_file(small_export / "model.safetensors")
    assert torch.equal(model.state_dict()[WEIGHT], saved[WEIGHT])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("model.safetensors", None, "cannot load"),
        ("config.json", "{", "is not a valid JSON file"),
        ("config.json", "[]", "cannot load"),
        ("config.json", '{"model_type": "fprnn", "n_layer": "two"}', "cannot load"),
        ("config.json", '{"model_type": "fprnn", "d_model": -5}', "cannot load"),
        ("tokenizer.json", "{", "cannot load the tokenizer of"),
        ("tokenizer.json", "{}", "cannot load the tokenizer of"),
    ],
)
def test_missing_or_damaged_export_files_are_refused(capsys, copy, name, text, words):
    if text is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(text)
    assert words in refused(capsys, "generate", copy, "--prompt", "a")


RESULT = {"updates": 1, "tokens": 1, "training_seconds": 1, "tokens_per_s": 1}


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "result.json is damaged"),
        ("[]", "result.json is damaged"),
        ("{}", "result.json is damaged"),
        ("[" * 100_000, "result.json is damaged: it is not JSON"),
        ('{"a":' * 100_000, "result.json is damaged: it is not JSON"),
        (RESULT | {"validation": {"perplexity": 1.0}}, "result.json is damaged"),
        (
            RESULT | {"validation": []},
            "result.json is damaged: `validation` is []: Input should",
        ),
        (
            RESULT | {"validation": {}, "updates": "x"},
            "`updates` is 'x': Input should",
        ),
        (
            RESULT | {"validation": {}, "tokens": [1]},
            "`tokens` is [1]: Input should",
        ),
        (
            RESULT | {"validation": {}, "training_seconds": {}},
            "`training_seconds` is {}: Input should",
        ),
        (
            RESULT | {"validation": {}, "tokens_per_s": True},
            "`tokens_per_s` is True: Input should",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_report_names_a_damaged_result(capsys, tmp_path, text, words):
    (tmp_path / "config.yaml").write_text("name: x")
    (tmp_path / "result.json").write_text(text if isinstance(text, str) else json.dumps(text))
    assert main(["report", str(tmp_path)]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_control_characters_of_files_are_escaped(capsys, tiny_run, tmp_path, undrawn):
    """Control characters of a failure, a result and records are escaped."""
    escapes = "\x1b]0;title\x07\x1b[2J\x9b31m"
    run = shutil.copytree(tiny_run, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
    result = json.loads((run / "result.json").read_text()) | {"solver": escapes}
    result["validation"]["sources"] = {escapes: {"perplexity": 2.0, "tokens": 3}}
    (run / "result.json").write_text(json.dumps(result))
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with (run / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(record | {"event": escapes, "warning": escapes}) + "\n")
    failed = shutil.copytree(run, tmp_path / "failed")
    (failed / "result.json").unlink()
    (failed / "failure.json").write_text(json.dumps({"sentence": escapes, "exit_code": 1}))
    for folder in (run, failed):
        for words in (("report", "--out", tmp_path / "page"), ("status",)):
            assert main([*map(str, words), str(folder)]) == 0
            shown = capsys.readouterr()
            assert not CONTROL.search(shown.out + shown.err)
            if words[0] == "report" and folder == failed:  # it prints the failure
                assert r"\x1b]0;title" in shown.out
        for name in ("report.html", "summary.json"):
            assert not CONTROL.search((tmp_path / "page" / name).read_text())


def test_report_names_damaged_scores(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text("name: x")
    scores = tmp_path / "hf" / "eval" / "results.json"
    scores.parent.mkdir(parents=True)
    for tasks in ([], {"a": []}, {"a": {"metrics": {"acc": {}}}}, {"a": {"metrics": {"acc": 1}}}):
        scores.write_text(json.dumps({"tasks": tasks}))
        assert main(["report", str(tmp_path)]) == 0
        output = " ".join(capsys.readouterr().out.split())
        assert "results.json is damaged: each task must have metrics" in output


def test_damaged_tokenizer_record_is_refused(capsys, tiny_run, tmp_path):
    run = shutil.copytree(tiny_run, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
    (run / "tokenizer" / "made_from.json").write_text("{")
    assert "made_from.json is damaged" in refused(capsys, "export", run, tmp_path / "out")


def test_code_runs_only_from_a_trusted_folder(tmp_path, monkeypatch):
    import transformers

    trust_options = []  # values of trust_remote_code, one per call

    def from_pretrained(path, **options):
        trust_options.append(options["trust_remote_code"])
        raise OSError("not loaded")

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", from_pretrained)
    for load in (load_model, load_tokenizer):
        for path in ("owner/name", tmp_path):
            for trust in (False, True):
                with pytest.raises(LoadError, match="not loaded"):
                    load(path, trust)
    # Only True for a folder with trust, for the model and the tokenizer.
    assert trust_options == 2 * [False, False, False, True]
