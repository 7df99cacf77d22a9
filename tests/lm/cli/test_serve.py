"""`fprnn serve`: refusals in a sentence, and completions for the client of OpenAI."""

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
def installed(monkeypatch):
    """Make the packages of the server look installed."""
    monkeypatch.setattr(serve, "require", lambda name, purpose: None)


def test_path_that_is_no_export_is_refused(tmp_path, capsys):
    said = refused(capsys, "serve", tmp_path)
    assert said == f"{tmp_path} is no export: make one with `fprnn export RUN {tmp_path}`"
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
def test_damaged_weights_are_refused(tiny_export, tmp_path, capsys, installed):
    damaged = tmp_path / "export"
    shutil.copytree(tiny_export, damaged)
    with open(damaged / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\xff\xff\xff\xff")
    assert "model.safetensors" in refused(capsys, "serve", damaged)


@contextlib.contextmanager
def served(export, log):
    """Serve an export within the block → its port."""
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


def expected(export, **sampling) -> str:
    from lm.evaluation.language_model import load

    loaded = load(export)
    model, tokenizer = loaded.model, loaded.tokenizer
    batch = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    out = model.generate(**batch, do_sample=False, max_new_tokens=12, **sampling)
    return tokenizer.decode(out[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_openai_client_receives_the_generated_text(tiny_export, tmp_path):
    openai = pytest.importorskip("openai")
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    with served(tiny_export, tmp_path / "log") as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        asked = dict(model=str(tiny_export), prompt=PROMPT, max_tokens=12, temperature=0)
        whole = client.completions.create(**asked)
        streamed = client.completions.create(**asked, stream=True)
        text = "".join(part.choices[0].text for part in streamed)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{**asked, "model": "another"})
    assert whole.choices[0].text == text == expected(tiny_export)
    assert whole.usage.completion_tokens == 12 and text
