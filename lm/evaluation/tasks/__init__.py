"""lm-eval task files of our own: they need no network and work from an installed package."""

from pathlib import Path

TASKS_DIR = Path(__file__).parent  # what lm-eval calls --include_path
