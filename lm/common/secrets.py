"""Masking of credentials in URLs, for everything that is printed, logged or written."""

from __future__ import annotations

import logging
import re

# `user:password@` or `token@` of a URL; not the @ in hf://datasets/NAME@COMMIT, after a slash.
CREDENTIALS = re.compile(r"(?<=://)[^/\s?#'\"]+@")


def mask_credentials(text: str) -> str:
    """Replace the credentials of every URL: `http://me:secret@host` → `http://***@host`."""
    return CREDENTIALS.sub("***@", text)


def mask_logs() -> None:
    """Mask credentials in the log records of all libraries in this process.

    For example, huggingface_hub logs the URL of every request that it repeats.
    """
    make_record = logging.getLogRecordFactory()
    if getattr(make_record, "masks_credentials", False):  # `mask_logs` was called before
        return

    def make_masked_record(*args, **kwargs) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # a malformed call: logging prints the error and continues
            return record
        masked = mask_credentials(message)
        if masked != message:
            record.msg, record.args = masked, ()
        return record

    make_masked_record.masks_credentials = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_masked_record)
