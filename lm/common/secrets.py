"""Hide the credentials of URLs in everything that is shown or written."""

from __future__ import annotations

import logging
import re

# user:password@ of a URL, or a token alone; hf://datasets/NAME@COMMIT has a slash before its @.
CREDENTIALS = re.compile(r"(?<=://)[^/\s?#'\"]+@")


def mask_credentials(text: str) -> str:
    """Replace the credentials of every URL in a text: `http://me:secret@host` → `http://***@host`."""
    return CREDENTIALS.sub("***@", text)


def mask_logs() -> None:
    """Mask what libraries log in this process: huggingface_hub logs URLs that it asks again."""
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
