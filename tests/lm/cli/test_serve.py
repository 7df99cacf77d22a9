"""`fprnn serve`: one-sentence errors, and completions for OpenAI's client."""

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from lm.cli import serve
from lm.cli.serve import PACKAGES
from lm.training.process_group import find_free_port
from tests.refusals import refused
from tests.running import ENV

PROMPT = "the list of"


@pytest.fixture
def server_packages(monkeypatch):
    """Make the packages of the server look installed."""
    monkeypatch.setattr(serve, "require", lambda name, purpose: None)


def test_path_that_is_no_export_is_refused(tmp_path, capsys):
    message = refused(capsys, "serve", tmp_path)
    assert f"{tmp_path} is no export: if it is a run, call `fprnn export {tmp_path} " in message
    assert "must be an integer 1 to 65535" in refused(capsys, "serve", tmp_path, "--port", 70000)


@pytest.mark.parametrize("package", PACKAGES)
def test_missing_package_of_serve_is_named(package, tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == package else find("sys" if name in PACKAGES else name, *a),
    )
    assert f"fprnn serve needs the package {package}" in refused(capsys, "serve", tmp_path)


@pytest.mark.slow
def test_damaged_weights_are_refused(tiny_export, tmp_path, capsys, server_packages):
    damaged = tmp_path / "export"
    shutil.copytree(tiny_export, damaged)
    with open(damaged / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\xff\xff\xff\xff")
    assert "model.safetensors" in refused(capsys, "serve", damaged)


@contextlib.contextmanager
def serve_export(export, log):
    """Serve an export within the block, and yield the port."""
    port = find_free_port()
    command = [sys.executable, "-m", "lm", "serve", export, "--host", "127.0.0.1", "--port", port]
    with open(log, "w") as out:
        server = subprocess.Popen([str(a) for a in command], env=ENV, stdout=out, stderr=out)
    try:
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            assert server.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        yield port
    finally:
        server.terminate()
        server.wait(30)


def generate_expected(export) -> str:
    """Return the greedy continuation of PROMPT by 12 tokens."""
    from lm.evaluation.language_model import load

    loaded = load(export)
    model, tokenizer = loaded.model, loaded.tokenizer
    batch = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    out = model.generate(**batch, do_sample=False, max_new_tokens=12)
    return tokenizer.decode(out[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_openai_client_receives_the_generated_text(tiny_export, tmp_path):
    openai = pytest.importorskip("openai")
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    with serve_export(tiny_export, tmp_path / "log") as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        request = dict(model=str(tiny_export), prompt=PROMPT, max_tokens=12, temperature=0)
        completion = client.completions.create(**request)
        parts = client.completions.create(**request, stream=True)
        streamed_text = "".join(part.choices[0].text for part in parts)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{**request, "model": "another"})
    assert completion.choices[0].text == streamed_text == generate_expected(tiny_export)
    assert completion.usage.completion_tokens == 12 and streamed_text
