"""Masking of credentials in URLs, for everything that is printed, logged or written."""

from __future__ import annotations

import logging
import re

# `user:password@` or `token@` of a URL. hf://datasets/NAME@COMMIT has a slash before its @.
CREDENTIALS = re.compile(r"(?<=://)[^/\s?#'\"]+@")


def mask_credentials(text: str) -> str:
    """Replace the credentials of every URL: `http://me:secret@host` → `http://***@host`."""
    return CREDENTIALS.sub("***@", text)


def mask_logs() -> None:
    """Mask the log records of all libraries in this process.

    huggingface_hub logs the URL of every request that it repeats.
    """
    make_record = logging.getLogRecordFactory()
    if getattr(make_record, "masks_credentials", False):
        return

    def make_masked_record(*args, **kwargs) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        message = record.getMessage()
        masked = mask_credentials(message)
        if masked != message:
            record.msg, record.args = masked, ()
        return record

    make_masked_record.masks_credentials = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_masked_record)
