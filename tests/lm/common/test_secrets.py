"""Credentials in URLs are masked in everything printed, logged or written."""

from __future__ import annotations

import json
import logging

import pytest

from lm.common.console import say
from lm.common.errors import UserError, describe_user_error
from lm.common.secrets import mask_credentials, mask_logs
from lm.data.sources.errors import HubUnreachable
from lm.data.sources.hub import check_hub
from lm.runs.run_dir import RunDir

URL = "http://someone:s3cr3t@127.0.0.1:9"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"{URL}/a?b cannot be reached", "http://***@127.0.0.1:9/a?b cannot be reached"),
        ("https://hf_token@host, https://u:p@ss@host", "https://***@host, https://***@host"),
        # These have no credentials: @ comes after a slash or a space.
        ("hf://datasets/OWNER/NAME@main/a", "hf://datasets/OWNER/NAME@main/a"),
        ("https://host/a@b me@host", "https://host/a@b me@host"),
    ],
)
def test_only_credentials_are_masked(text, masked):
    assert mask_credentials(text) == masked


def test_every_output_is_masked(tmp_path, capsys, monkeypatch, caplog):
    error = UserError(f"{URL} cannot be reached")
    RunDir(tmp_path).record_failure(error)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["sentence"] == describe_user_error(error)
    monkeypatch.setattr(say, "enabled", True)
    say(f"waiting for {URL}")
    before = logging.getLogRecordFactory()
    try:
        mask_logs()
        mask_logs()  # the second call does nothing
        logging.getLogger("huggingface_hub.utils").warning("GET %s/a failed", URL)
        logging.getLogRecordFactory()("a", 30, "a.py", 1, "malformed", (FutureWarning,), None)
    finally:
        logging.setLogRecordFactory(before)
    shown = [describe_user_error(error), capsys.readouterr().out, caplog.text]
    assert all("***@127.0.0.1:9" in output for output in shown)
    assert not any("s3cr3t" in output for output in shown)


def test_unreachable_hub_is_named_without_credentials(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", URL)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(HubUnreachable) as refused:
        check_hub("a dataset")
    assert "but http://***@127.0.0.1:9 cannot be reached" in describe_user_error(refused.value)
