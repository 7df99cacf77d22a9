"""`benchmarks/card_wheels.py`: compiled architectures and pinned versions."""

from pathlib import Path

import pytest

from benchmarks import card_wheels

SETUP = """
cc_flag.append("-gencode")
cc_flag.append("arch=compute_75,code=sm_75")
    if bare_metal_version >= Version("11.8"):
        cc_flag.append("-gencode")
        cc_flag.append("arch=compute_90,code=sm_90")
flags = ["-O3", "-lineinfo", "--threads", "4"]
"""


def test_architectures_come_from_the_environment(tmp_path):
    setup = tmp_path / "setup.py"
    setup.write_text(SETUP)
    card_wheels.use_chosen_architectures(setup)
    text = setup.read_text()
    assert text.count("pass") == 4  # one for each of the four lines of flags
    assert "        pass\n" in text  # with the indentation of the line
    assert "sm_" not in text and "gencode" not in text and "lineinfo" not in text
    assert '"--threads", "1"' in text


def test_unknown_setup_is_refused(tmp_path):
    setup = tmp_path / "setup.py"
    setup.write_text("cc_flags = arches()")
    with pytest.raises(SystemExit, match="names no architectures any more"):
        card_wheels.use_chosen_architectures(setup)


def test_every_wheel_has_a_pinned_version():
    text = (Path(card_wheels.ROOT) / "constraints.txt").read_text(encoding="utf-8").lower()
    pinned = {line.split("==")[0].replace("_", "-") for line in text.splitlines()}
    names = (*card_wheels.WHEELS_TO_DOWNLOAD, *card_wheels.WHEELS_TO_BUILD)
    wheels = {name.lower().replace("_", "-") for name in names}
    assert wheels <= pinned
