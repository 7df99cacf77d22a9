"""Command line `fprnn`: the commands of `lm.cli`, and `synthetic` and `demo` of this package.

It is not in the package `fprnn`, because importing that imports PyTorch and transformers.
"""

from lm.cli import main as lm_command
from synthetic import cli


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: Words after `fprnn`; None: those of this process.
    """
    return lm_command.main(argv, more_commands=(cli.add, cli.add_demo))
