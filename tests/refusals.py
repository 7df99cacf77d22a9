"""What a command line says when it refuses."""

from lm.cli.main import main
from tests.running import REFUSED


def refused(capsys, *args, run=main, prog="fprnn") -> str:
    """The sentence with which `run` (a command line's main) refuses; nothing else is printed."""
    try:
        status = run([str(a) for a in args])
    except SystemExit as e:  # of argparse
        status = e.code
    shown = capsys.readouterr()
    assert status in {*REFUSED, 2}, shown
    assert shown.out == ""
    last = shown.err.splitlines()[-1]
    if status in REFUSED:
        assert shown.err == last + "\n" and last.startswith("error: "), shown.err
    else:
        assert shown.err.startswith(f"usage: {prog}"), shown.err
    return last.partition("error: ")[2]
