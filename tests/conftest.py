"""Shared by all tests: one thread, offline, a corpus cache outside the home, GPU tests skipped
without a GPU, a tiny config."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # no table is wrapped
os.environ.setdefault("FPRNN_TEST_SESSION", str(os.getpid()))  # pytest-xdist's workers inherit it
if "FPRNN_TEST_CACHE" not in os.environ:  # of all processes of a session, pytest-xdist's too
    os.environ["FPRNN_TEST_CACHE"] = tempfile.mkdtemp(prefix="fprnn-cache-")
    atexit.register(shutil.rmtree, os.environ["FPRNN_TEST_CACHE"], ignore_errors=True)
os.environ["FPRNN_CACHE"] = os.path.join(os.environ["FPRNN_TEST_CACHE"], "corpora")

import pytest
import torch

if not torch.cuda.is_available():  # read when a kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.running import fprnn, losses, run

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores: tests that wait for processes leave one idle."""
    count = yield
    return count if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else count + 1


def pytest_terminal_summary(terminalreporter):
    """Scores that passed tests have printed, such as that of the mutations."""
    for report in terminalreporter.stats.get("passed", []):
        for line in report.capstdout.splitlines():
            if line.startswith("score: "):
                terminalreporter.write_line(f"{report.nodeid}: {line}")


@pytest.fixture
def tiny(tmp_path):
    """A function (override, …) → Config of configs/tiny/lm.yaml with its run under tmp_path."""
    from lm.config import load as config  # pydantic; the tests of kernels and models run without

    def build(*overrides):
        path = ROOT / "tests/data/tiny.jsonl"
        fixed = (f"out_dir={tmp_path / 'runs'}", f"data.path={path}")
        return config.load(ROOT / "configs/tiny/lm.yaml", (*fixed, *overrides))

    return build


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without their figures, which take most of the time."""
    from lm.report import figures

    monkeypatch.setattr(figures, "save", lambda figure, folder: "")


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """The folder of a byte-level tokenizer of 257 tokens, EOS first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["a"], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_export(tmp_path_factory, byte_tokenizer):
    """The export of a small random model; not to be changed."""
    from lm.export.export import write_export
    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.modeling_fprnn import FPRNNForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 264, "d_model": 16, "n_layer": 1, "d_state": 4}
    tokens = {"eos_token_id": 0, "pad_token_id": 0}
    config = FPRNNConfig(glu_in_loop=True, contractive=0.5, **sizes, **tokens)
    folder = tmp_path_factory.mktemp("export") / "small"
    return write_export(FPRNNForCausalLM(config), folder, byte_tokenizer, "small", "Random.")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The run directory of configs/tiny/lm.yaml, trained once for all tests; not to be changed."""
    out = tmp_path_factory.mktemp("tiny") / "runs"
    run(out)
    return out / "tiny"


@pytest.fixture(scope="session")
def tiny_losses(tiny_run):
    """Its training records."""
    return losses(tiny_run)


@pytest.fixture(scope="session")
def tiny_export(tiny_run):
    """Its HuggingFace directory."""
    done = fprnn("export", tiny_run, tiny_run / "hf")
    assert done.returncode == 0, done.stderr
    return tiny_run / "hf"
