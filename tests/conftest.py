"""Environment and fixtures of all tests.

Tests use one thread, no network and a temporary corpus cache. Without a GPU, GPU tests are skipped.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # so that no table is wrapped
# Workers of pytest-xdist inherit both variables.
os.environ.setdefault("FPRNN_TEST_SESSION", str(os.getpid()))
if "FPRNN_TEST_CACHE" not in os.environ:
    os.environ["FPRNN_TEST_CACHE"] = tempfile.mkdtemp(prefix="fprnn-cache-")
    atexit.register(shutil.rmtree, os.environ["FPRNN_TEST_CACHE"], ignore_errors=True)
os.environ["FPRNN_CACHE"] = os.path.join(os.environ["FPRNN_TEST_CACHE"], "corpora")

import pytest
import torch

if not torch.cuda.is_available():  # must be set before kernels are defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.running import fprnn, read_losses, run

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
    """Use one worker more than cores, because tests that wait for processes leave a core idle."""
    count = yield
    return count if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else count + 1


def pytest_terminal_summary(terminalreporter):
    """Print the scores of passed tests, such as the score of the mutations."""
    for report in terminalreporter.stats.get("passed", []):
        for line in report.capstdout.splitlines():
            if line.startswith("score: "):
                terminalreporter.write_line(f"{report.nodeid}: {line}")


@pytest.fixture
def tiny(tmp_path):
    """Function of overrides that loads configs/tiny/lm.yaml, with its run under tmp_path."""
    # Imported here, because tests of kernels and models run without pydantic.
    from lm.config import load as config

    def build(*overrides):
        path = ROOT / "tests/data/tiny.jsonl"
        paths = (f"out_dir={tmp_path / 'runs'}", f"data.path={path}")
        return config.load(ROOT / "configs/tiny/lm.yaml", (*paths, *overrides))

    return build


@pytest.fixture
def messages(monkeypatch):
    """List of the messages that this process would print by `say`."""
    from lm.common.console import say

    printed = []

    def record(self, text):
        if self.enabled:
            printed.append(str(text))

    monkeypatch.setattr(say, "enabled", True)  # an earlier test may have disabled it
    monkeypatch.setattr(type(say), "__call__", record)
    return printed


@pytest.fixture
def undrawn(monkeypatch):
    """Make reports draw no figures, which would take most of the time."""
    from lm.report import figures

    monkeypatch.setattr(figures, "save", lambda figure, folder: "")


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """Folder of a byte-level tokenizer with 257 tokens; EOS is token 0."""
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
    """Export of a small random model; tests must not change it."""
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
    """Run directory of configs/tiny/lm.yaml, trained once per session; tests must not change it."""
    out = tmp_path_factory.mktemp("tiny") / "runs"
    run(out)
    return out / "tiny"


@pytest.fixture(scope="session")
def tiny_losses(tiny_run):
    """Training records of `tiny_run`."""
    return read_losses(tiny_run)


@pytest.fixture(scope="session")
def tiny_export(tiny_run):
    """Hugging Face export of `tiny_run`."""
    result = fprnn("export", tiny_run, tiny_run / "hf")
    assert result.returncode == 0, result.stderr
    return tiny_run / "hf"
