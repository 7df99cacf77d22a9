"""Names of a user's files reach the terminal as text: no emoji, no markup, no escape sequence."""

import pytest
from rich.table import Table

from lm.common.console import say

NAME = "runs/a\x1b[2J\x1b]0;title\x07[red]:m::smile: mixers:M"
SHOWN = r"runs/a\x1b[2J\x1b]0;title\x07[red]:m::smile: mixers:M"


def table():
    made = Table("run", title=NAME, caption=NAME)
    made.add_row(NAME)
    return made


@pytest.mark.parametrize("printed", [lambda: NAME, table])
def test_a_name_is_printed_as_it_is_and_control_characters_are_written_out(capsys, printed):
    say._console = None  # of this test's output
    try:
        say(printed())
    finally:
        say._console = None
    shown = capsys.readouterr().out
    assert SHOWN in shown and "\x1b" not in shown and "\x07" not in shown


def test_line_breaks_and_tabs_stay(capsys):
    say._console = None
    say("a\n\tb")
    say._console = None
    assert capsys.readouterr().out.split() == ["a", "b"]
