"""Only files that fprnn wrote are deleted; a folder with other files is refused."""

import shutil
from pathlib import Path

import pytest

from lm.runs.owned_files import RUN_FILES, describe_foreign_files, list_files, make_run_file_test
from lm.runs.run_dir import RunDir, RunDirError
from tests.running import fprnn

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run_copy(tiny_run, tmp_path):
    """A copy of the tiny run that a test may delete."""
    ignore_export = shutil.ignore_patterns("hf")  # another test may have exported the run
    return Path(shutil.copytree(tiny_run, tmp_path / "runs/tiny", ignore=ignore_export))


def claim(tiny, folder, overwrite):
    run = RunDir(folder)
    run.claim(tiny(f"out_dir={folder.parent}", f"name={folder.name}"), overwrite)
    run.release()


def read_files(folder):
    return {name: (folder / name).read_bytes() for name in list_files(folder)}


def write(folder, name, text="mine"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_file_of_run_report_and_export_is_known(tiny, run_copy):
    exports = [("export", run_copy, run_copy / name) for name in ("hf", "hf-4")]
    for command in (("report", run_copy), *exports, ("inspect", run_copy, "abc")):
        process = fprnn(*command)
        assert process.returncode == 0, process.stderr
    write(run_copy, "hf/eval/results.json")
    assert describe_foreign_files(run_copy, make_run_file_test(run_copy)) == ""
    claim(tiny, run_copy, overwrite=True)
    assert set(list_files(run_copy)) == {"config.yaml"}
    assert not (run_copy / "hf").exists() and not (run_copy / "tokenizer").exists()


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "wandb/offline-run-20261127_021012-abc/files/output.log",
        "wandb/latest-run",
        "tensorboard/events.out.tfevents.1.host.2.0",
        "profile/updates-3-5.trace.json.gz",
        "data/web/train.bin",
        "data/lease.json",
        "data/files.json",
        "data/corpus-0a/shards.json",
        "data/web/corpus-0a/train.tmp",
        "data/web/corpus-0a/about.json",
        "checkpoints/step-000004-17.partial/x_states.pt",
        "checkpoints/step-000004/.manifest.json.12.tmp",
        "tokenizer/vocab.json",
        "stacks/rank0000.txt",
        "checkpoints/last.pt",
        ".tokenizer-a1_b2c3d/tokenizer.json",
        "eval-max_iters-4.json",
        "eval/results.json",
        "data/corpus-1a/lock",
        "data/corpus-1a/shards.jsonl",
        "data/web/corpus-1a/train.bin",
    ],
)
def test_run_files_pattern_matches_the_layout(name):
    assert RUN_FILES.fullmatch(name)


@pytest.mark.parametrize(
    "name,folder",
    [
        ("notes.txt", ""),
        ("b/config.yaml", "b/"),
        ("b/checkpoints/step-000004/x.pt", "b/"),
        (".git/refs/heads/main", ".git/"),
        ("data/mine.jsonl", ""),
        ("checkpoints/epoch1.pt", ""),
        ("checkpoints/b/epoch1.pt", "checkpoints/b/"),
        ("figures/mine.png", "figures/"),
        ("tokenizer/notes.txt", ""),
        ("hf/notes.txt", "hf/"),
        ("wandb/notes.txt", "wandb/"),
    ],
)
def test_overwrite_refuses_files_of_others(tiny, run_copy, name, folder):
    write(run_copy, name)
    before = read_files(run_copy)
    with pytest.raises(RunDirError, match=rf"no training wrote there \({folder or name}\)"):
        claim(tiny, run_copy, overwrite=True)
    assert read_files(run_copy) == before


def test_link_to_a_folder_is_not_followed(tiny, run_copy, tmp_path):
    write(tmp_path, "elsewhere/step-000008/manifest.json")
    shutil.rmtree(run_copy / "checkpoints")
    (run_copy / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match=r"no training wrote there \(checkpoints\)"):
        claim(tiny, run_copy, overwrite=True)
    assert (tmp_path / "elsewhere/step-000008/manifest.json").is_file()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"config.yaml": "lr: 1\n"},
        {"config.yaml": "lr: 1\n", "train.py": "…"},
        {"config.yaml": "a: [\n", "lease.json": "{}"},
        {"config.yaml": (ROOT / "configs/tiny/lm.yaml").read_text()},
        {"lease.json": "{}", "thesis.txt": "…"},
    ],
)
def test_folder_with_handwritten_config_is_not_deleted(tiny, tmp_path, files, overwrite):
    folder = tmp_path / "runs/mine"
    for name, text in files.items():
        write(folder, name, text)
    before = read_files(folder)
    with pytest.raises(RunDirError, match="mine"):
        claim(tiny, folder, overwrite)
    assert read_files(folder) == before


def test_failed_start_is_repeated_and_foreign_file_stays(tiny, run_copy):
    for name in ("metrics.jsonl", "result.json"):
        (run_copy / name).unlink()
    shutil.rmtree(run_copy / "checkpoints")
    write(run_copy, "notes.txt")
    with pytest.raises(RunDirError, match=r"notes\.txt"):
        claim(tiny, run_copy, overwrite=False)
    (run_copy / "notes.txt").unlink()
    claim(tiny, run_copy, overwrite=False)
    assert set(list_files(run_copy)) == {"config.yaml"}
