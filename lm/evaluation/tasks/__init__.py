"""lm-eval tasks of this project, which need no network."""

from pathlib import Path

TASKS_DIR = Path(__file__).parent  # for lm-eval's option --include_path
