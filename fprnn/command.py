"""The command line `fprnn`: the commands of lm, and those of the validation suite beside them."""

from lm.cli.main import main as main_of_lm
from synthetic import cli


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `lm.cli.arguments.run`."""
    return main_of_lm(argv, more=(cli.add, cli.add_demo))
