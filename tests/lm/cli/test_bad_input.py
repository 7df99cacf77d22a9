"""Bad input: every command prints one sentence, before anything slow starts."""

import argparse
import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lm.common.errors
from lm.cli.arguments import Integer, PositiveNumber, parse_names
from lm.cli.main import main, make_parser
from lm.common.errors import UserError, describe_user_error, install_command
from lm.evaluation.language_model import LanguageModelError, load
from tests.refusals import refused
from tests.running import ENV

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs/tiny/lm.yaml")


def dry_run(*overrides) -> list[str]:
    data = f"data.path={ROOT}/tests/data/tiny.jsonl"
    return ["train", "--config", TINY, "--dry-run", data, *overrides]


# The base class of errors.


def test_user_errors_have_a_sentence_and_bugs_have_none():
    assert describe_user_error(UserError("a reason")) == "a reason"
    assert describe_user_error(FloatingPointError("layer 3: NaN")) == "layer 3: NaN"
    assert describe_user_error(ModuleNotFoundError("x", name="wandb.sdk")) == (
        "this command needs the package wandb, which is not installed: " + install_command("wandb")
    )
    wrapped = ModuleNotFoundError("Could not import module 'AutoModel'")
    wrapped.__cause__ = ModuleNotFoundError("x", name="safetensors")
    install = install_command("safetensors")
    assert describe_user_error(wrapped).endswith(f"is not installed: {install}")
    bugs = (ValueError("x"), KeyError("x"), ModuleNotFoundError("x", name="lm.nothing"), OSError())
    assert [describe_user_error(bug) for bug in bugs] == [None] * 4


GLOO = "[enforce fail at loop.cc:105] fd_ != -1. -1 vs -1. epoll_create: Too many open files"
TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error, expected_text",
    [
        (RuntimeError(TORCH + ": you tried to allocate 67108864 bytes."), "allocate more memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."), "allocate more memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "allocate more memory"),
        (MemoryError(), "allocate more memory"),
        (RuntimeError(GLOO), "cannot open more files: `ulimit -n`"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "cannot open more files"),
        (RuntimeError("size mismatch"), None),
        (ValueError(TORCH), None),
    ],
)
def test_exceeded_limit_of_the_process_is_a_sentence(error, expected_text):
    message = describe_user_error(error)
    assert message is None if expected_text is None else expected_text in message


@pytest.mark.parametrize("command", [["sweep", "x.yaml"], ["report", "x"]])
def test_bug_keeps_its_traceback(monkeypatch, command):
    def raise_bug(*_):
        raise ValueError("a bug")  # the base class of many of our errors

    monkeypatch.setattr("lm.config.load.load_tree", raise_bug)
    monkeypatch.setattr("lm.runs.path_checks.check_run", raise_bug)
    with pytest.raises(ValueError, match="a bug"):
        main(command)


# Sizes of models.


@pytest.mark.parametrize(
    "overrides, expected_text",
    [
        (["model.mixer=monarch", "model.mixer_rank=7"], "mixer_rank is 7: for monarch it is the"),
        (["model=transformer", "model.n_heads=3"], "n_heads is 3 (3 heads): it must divide"),
    ],
)
def test_conflicting_sizes_are_refused(capsys, tiny, overrides, expected_text):
    assert expected_text in refused(capsys, *dry_run(*overrides))

    from lm.training.build import check_section

    cfg = tiny(*overrides)
    before = torch.get_rng_state()
    with pytest.raises(lm.common.errors.ConfigError) as e:
        check_section(cfg.model, cfg.solver, cfg.data.seq_len)
    assert expected_text in str(e.value)
    assert torch.equal(torch.get_rng_state(), before)


# Training refuses these before it reads or writes anything.


@pytest.mark.parametrize(
    "overrides, expected_text",
    [
        (["resume=sometimes"], "`resume` is 'sometimes': it must be never, auto or an existing"),
        (["engine.deepspeed={optimizer: {type: Lion}}"], "sets optimizer, which is derived from"),
        (["engine.deepspeed={scheduler: {type: OneCycle}}"], "remove it, and set `optim.sched"),
    ],
)
def test_invalid_training_is_refused_before_it_starts(capsys, tiny, overrides, expected_text):
    from lm.training.preflight import check

    with pytest.raises(UserError) as e:
        check(tiny(*overrides), 1)
    assert expected_text in str(e.value)
    assert expected_text in refused(capsys, *dry_run(*overrides))


def test_large_model_on_a_cpu_needs_confirmation(tiny, monkeypatch):
    from lm.training.preflight import check

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    large = ["model.d_model=1024", "model.n_layer=12"]
    with pytest.raises(UserError, match=r"no GPU, and the model has \d+ M .*DEVICES=''"):
        check(tiny(*large), 1)
    check(tiny(), 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check(tiny(*large), 1)


@pytest.mark.parametrize(
    "environment, expected_text",
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc' in the environment: it must be a whole"),
        ({"WORLD_SIZE": "0"}, "from 1 to 1000000"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'"),
        ({"RANK": "0"}, "the environment has RANK but no WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is '2' in the environment: it must be a whole"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "started 4 tasks (SLURM_STEP_NUM_TASKS) but no RANK"),
    ],
)
def test_impossible_launcher_variables_are_refused(
    capsys, monkeypatch, tmp_path, environment, expected_text
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert expected_text in refused(capsys, *dry_run())
    assert expected_text in refused(capsys, "train", "--config", TINY, f"out_dir={tmp_path}/runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "address, expected_text",
    [
        ({}, "the environment has RANK but no MASTER_ADDR"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT is 'x' in the environm"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is '0' in the environment"),
    ],
)
def test_missing_master_address_is_refused(capsys, monkeypatch, tiny, address, expected_text):
    from lm.training.process_group import join_process_group

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **address}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=expected_text):
        join_process_group(tiny())


def test_terminal_with_a_limited_encoding(tmp_path):
    """A character that it cannot print is printed as an escape sequence."""
    config = tmp_path / "sweep.yaml"
    config.write_text("name: ℓ\nsweep: {seed: [1]}\n", encoding="utf-8")
    command = [sys.executable, "-m", "lm", "sweep", config]
    env = ENV | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "\\u2113/000-seed=1\n", done.stderr


@pytest.mark.parametrize(
    "python, output, message",
    [
        ("python", ">/dev/full", "error: the output, or a file: No space left on device\n"),
        ("python -u", "| true", ""),  # unbuffered, so that no flush notices the closed pipe
        pytest.param("python", "| true", "", marks=pytest.mark.slow),
    ],
)
def test_full_disk_and_closed_pipe_as_output(python, output, message):
    python = python.replace("python", sys.executable)
    command = f"{python} -m lm sweep configs/lm/sweep_mixers.yaml {output}"
    bash = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(bash, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.stderr == message and (done.returncode == 1 or output == "| true"), done


TOO_LARGE = (
    "train.threads=1e11 model.d_model=1e12 model.n_layer=1e9 engine.timeout_s=1e13 train.steps=1e23"
    " train.micro_batch_size=1000000 data.seq_len=1e9 model.vocab_size=1e10 data.workers=100000"
)


@pytest.mark.parametrize("override", TOO_LARGE.split())
def test_impossible_sizes_are_refused(capsys, override):
    key = override.partition("=")[0]
    pattern = rf"`{key}` is \S+: (it must be (less|a whole number)|.*exceeded maximum size)"
    assert re.search(pattern, refused(capsys, *dry_run(override)))


def test_sweep_with_a_million_points_is_refused(capsys, tmp_path):
    values = list(range(1, 101))
    path = tmp_path / "sweep.yaml"
    path.write_text(f"sweep: {{seed: {values}, train.steps: {values}, data.seq_len: {values}}}")
    for command in (("sweep", path), ("train", "--config", path, "--job-index", 0)):
        message = refused(capsys, *command)
        assert "its sweep has 1,000,000 points; a sweep may have at most" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can")
def test_fp16_on_a_cpu_is_refused(tiny):
    from lm.training.preflight import check

    with pytest.raises(UserError, match=r"fp16\.enabled, which needs a GPU, and there is none"):
        check(tiny("engine.deepspeed={fp16: {enabled: true}}"), 1)
    with pytest.raises(UserError, match=r"engine.deepspeed sets fp16 to True: it must be a map"):
        check(tiny("engine.deepspeed={fp16: true}"), 1)


def test_sweep_needs_a_job_index(capsys, tmp_path):
    path = str(ROOT / "configs/lm/sweep_mixers.yaml")
    train = ["train", "--config", path, f"out_dir={tmp_path}/runs"]
    for options in ([], ["--dry-run"]):
        assert refused(capsys, *train, *options) == (
            f"{path} is a sweep: choose a point with --job-index 0 to 5; or"
            " pass sweep={} to use the config without its sweep"
        )
    assert not (tmp_path / "runs").exists()
    train.append("--dry-run")
    assert "outside the sweep: 0 to 5" in refused(capsys, *train, "--job-index", 6)
    assert main([*train, "--job-index", "5"]) == 0
    assert "sweep: {}\n" in capsys.readouterr().out  # the configuration is one run
    assert main([*train, "sweep={}"]) == 0


def test_unknown_kernels_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("FPRNN_KERNELS", "nope")
    message = refused(capsys, *dry_run())
    assert "FPRNN_KERNELS is `nope`: it must be auto, plain or one of" in message


@pytest.mark.parametrize(
    "sweep, expected_text",
    [
        ("{name: [a, b]}", "is a sweep over `name`, which all points share"),
        ("{out_dir: [a, b]}", "is a sweep over `out_dir`"),
        ("{sweep: [{}]}", "is a sweep over `sweep`"),
        ("{models: {a: {model.d_state: 4, name: x}}}", "sweep.models.a is a sweep over `name`"),
    ],
)
def test_sweep_with_equal_points_is_refused(capsys, tmp_path, sweep, expected_text):
    path = tmp_path / "sweep.yaml"
    path.write_text(f"sweep: {sweep}\n")
    assert expected_text in refused(capsys, "sweep", path)


def test_sweep_checks_all_points_at_once(capsys, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("sweep: {train.steps: [100, 10]}\noptim: {warmup: 50}\n")
    assert "but train.steps is only 10" in refused(capsys, "sweep", path)


@pytest.mark.parametrize("key", ["name", "out_dir"])
def test_control_characters_in_names_are_refused(capsys, key):
    for character in (r"\e", r"\x9b", r"\n", r"\u202e"):
        message = refused(capsys, *dry_run(f'{key}="a{character}]0;title"'))
        assert "contains a character that no folder name may contain" in message


@pytest.mark.parametrize("key", ["data.cache_dir", "data.path", "tokenizer.name", "init_from"])
def test_nul_in_paths_is_refused(capsys, key):
    assert f"`{key}" in (message := refused(capsys, *dry_run(f'{key}="a\\0"')))
    assert "contains the character NUL, which no path may contain" in message


def test_control_characters_in_arguments_are_escaped(capsys):
    message = refused(capsys, "sweep", "\x1b[31m.yaml")
    assert message == r"\x1b[31m.yaml: no such file; give a YAML file"


# Options.


def list_options() -> list[argparse.Action]:
    """Return the options of all commands that take a value."""
    (commands,) = (a for a in make_parser()._actions if a.dest == "command")
    actions = [action for parser in commands.choices.values() for action in parser._actions]
    return [action for action in actions if action.option_strings and action.nargs != 0]


def list_number_options() -> list[argparse.Action]:
    return [a for a in list_options() if isinstance(a.type, Integer | PositiveNumber)]


def test_help_states_the_range_of_every_number():
    numbers = list_number_options()
    assert len(numbers) > 10
    assert {a.type for a in list_options()} - {a.type for a in numbers} == {None, parse_names}
    for option in numbers:
        ranges = ("at least", "above 0", "counted from 0", "1 to 65535")
        assert any(text in option.help for text in ranges), option


def test_numbers_out_of_range_are_refused():
    for action in list_number_options():
        invalid_texts = ["-1", "nan", "inf", "lots", "", str(-(10**30))]
        if not getattr(action.type, "allow_zero", False) and getattr(action.type, "min", 1):
            invalid_texts.append("0")
        for text in invalid_texts:
            with pytest.raises(argparse.ArgumentTypeError, match=r"must be an? (int|finite)"):
                action.type(text)
        assert action.default is None or action.type(str(action.default)) == action.default


@pytest.mark.parametrize(
    "args, expected_text",
    [
        (["--max-new-tokens", "0"], "argument --max-new-tokens: '0' is invalid: it must be an int"),
        (["--temperature", "nan"], "argument --temperature: 'nan' is invalid: it must be a finite"),
        (["--top-p", "0.5"], "unrecognized arguments: --top-p 0.5"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a\udcff"], "the prompt is not text: character 1 is not UTF-8"),
        (["--temperature", "1e-300"], "temperature is 1e-300: it must be 0 (greedy) or at least"),
    ],
)
def test_invalid_options_of_generate_are_refused(capsys, small_export, args, expected_text):
    assert expected_text in refused(capsys, "generate", small_export, "--prompt", "a", *args)


@pytest.mark.parametrize(
    "options, expected_text",
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be greater than 0"),
        ({"temperature": -1.0}, "temperature is -1: it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "`top_k` has to be a strictly positive integer"),
    ],
)
def test_invalid_arguments_of_generate_in_python_are_refused(small_export, options, expected_text):
    with pytest.raises((LanguageModelError, ValueError), match=expected_text):
        load(small_export).generate("a", **options)


def test_empty_list_of_tasks_is_refused(capsys, small_export):
    message = refused(capsys, "eval", small_export, "--tasks", " , ")
    assert "argument --tasks: the list is empty" in message


# Configuration files.


@pytest.mark.parametrize(
    "text, expected_text",
    [
        (b"- 1\n", "must hold a mapping of keys to values"),
        (b"seed: 1\nseed: 2\n", "is not valid YAML, line 2, column 1: key `seed` appears twice"),
        (b"train:\n\tsteps: 1\n", "line 2, column 1: it is indented with a tab"),
        (b"a: [1", "is not valid YAML, line 1, column 6: "),
        (b"a: 1\n---\nb: 2\n", "is not valid YAML, line 2"),
        (b"name: !!python/object:os.system ls\n", "is not valid YAML, line 1, column 7"),
        (b"? [a, b]\n: 2\n", "is not valid YAML, line 1"),
        (b"name: a\0b\n", "is not valid YAML: character 8 is '\\x00', which must be escaped"),
        (b"a: " + b"[" * 3000, "is nested too deep"),
        (b"name: \xff\xfe\n", "is not UTF-8 text: byte 6 is 0xff"),
    ],
)
def test_invalid_yaml_files_are_refused(capsys, tmp_path, text, expected_text):
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    message = refused(capsys, "train", "--config", path, "--dry-run")
    assert message.startswith(f"{path}") and expected_text in message


def test_folder_instead_of_a_file_is_refused(capsys, tmp_path):
    for command in (["train", "--dry-run", "--config"], ["sweep"]):
        message = refused(capsys, *command, tmp_path)
        assert message == f"{tmp_path} is a folder: name a YAML file in it"


def test_broken_pipe_other_than_stdout_is_a_bug(monkeypatch):
    """For example in the connection to wandb: it must not end a training without a message."""
    from lm.cli.arguments import run

    def raise_error(args):
        raise BrokenPipeError("of a service")

    with pytest.raises(BrokenPipeError, match="of a service"):
        run(argparse.Namespace(run_command=raise_error))
