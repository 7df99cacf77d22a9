"""Error messages of refused commands."""

from lm.cli.main import main
from tests.running import REFUSED


def refused(capsys, *args, run=main, prog="fprnn") -> str:
    """Run a command that must be refused, and return its error sentence.

    Fail if the command succeeds or prints anything else.

    Args:
        capsys: The fixture of pytest.
        args: Arguments of the command line.
        run: The `main` of the command line.
        prog: Name of the command line in usage messages.
    """
    try:
        status = run([str(a) for a in args])
    except SystemExit as e:  # raised by argparse
        status = e.code
    captured = capsys.readouterr()
    assert status in {*REFUSED, 2}, captured
    assert captured.out == ""
    last_line = captured.err.splitlines()[-1]
    if status in REFUSED:
        assert captured.err == last_line + "\n" and last_line.startswith("error: "), captured.err
    else:
        assert captured.err.startswith(f"usage: {prog}"), captured.err
    return last_line.partition("error: ")[2]
