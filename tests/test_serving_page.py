"""docs/serving.md: its Python runs, with a tiny export instead of the named one."""

import subprocess
import sys

import pytest

from tests.running import ENV
from tests.test_docs import find_blocks

CHECKS = """
assert [len(texts) for texts in pipe(["The list", "A"], max_new_tokens=3, batch_size=2)] == [1, 1]
"""


@pytest.mark.slow
def test_python_of_the_page_runs(tiny_export, tmp_path):
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/hf").symlink_to(tiny_export)
    blocks = [block for block in find_blocks("serving.md") if block[1] == "python"]
    scripts = [text for reason, _, text in blocks if not reason]
    assert len(blocks) == 3 and len(scripts) == 1
    for _, _, text in blocks:
        compile(text, "serving.md", "exec")
    result = subprocess.run(
        [sys.executable, "-c", "\n".join([*scripts, CHECKS])],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Do you wish to run the custom code" not in result.stdout + result.stderr
