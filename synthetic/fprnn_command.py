"""Command line `fprnn`: the commands of `lm.cli`, and `synthetic` and `demo` of this package.

It is not in the package `fprnn`, because importing `fprnn` imports PyTorch and transformers.
"""

from lm.cli import main as lm_cli
from synthetic import cli


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: Arguments after `fprnn`; None: the arguments of this process.
    """
    return lm_cli.main(argv, more_commands=(cli.add_synthetic, cli.add_demo))
