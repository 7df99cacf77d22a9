"""Output on the terminal: names of files as text, and the progress of long work."""

import io
from datetime import datetime
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from lm.common import console
from lm.common.console import say

NAME = "runs/a\x1b[2J\x1b]0;title\x07[red]:m::smile: mixers:M"
ESCAPED_NAME = r"runs/a\x1b[2J\x1b]0;title\x07[red]:m::smile: mixers:M"


@pytest.fixture
def new_console():
    """Let `say` create a console for the output that capsys captures, and forget it afterwards."""
    say._console = None
    yield
    say._console = None


def make_table():
    table = Table("run", title=NAME, caption=NAME)
    table.add_row(NAME)
    return table


@pytest.mark.parametrize("make_output", [lambda: NAME, make_table], ids=["text", "table"])
def test_names_are_verbatim_and_control_characters_escaped(capsys, new_console, make_output):
    say(make_output())
    shown = capsys.readouterr().out
    assert ESCAPED_NAME in shown and "\x1b" not in shown and "\x07" not in shown


def test_line_breaks_and_tabs_are_not_escaped(capsys, new_console):
    say("a\n\tb")
    assert capsys.readouterr().out.split() == ["a", "b"]


@pytest.fixture
def screen(monkeypatch):
    """Return a function (is_terminal) that lets `say` print into a file, and returns the file."""

    def capture(is_terminal):
        file = io.StringIO()
        fake = Console(file=file, force_terminal=is_terminal, width=100, highlight=False)
        monkeypatch.setattr(say, "_console", fake)
        monkeypatch.setattr(say, "enabled", True)
        return file

    return capture


@pytest.fixture
def clock(monkeypatch):
    """Return a clock whose `seconds` the test sets; the time of day is always 07:05:09."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    time_of_day = datetime(2026, 1, 2, 7, 5, 9)
    monkeypatch.setattr(console, "datetime", SimpleNamespace(now=lambda: time_of_day))
    return clock


def test_progress_prints_texts_at_once_and_else_rarely(screen, clock):
    """The first update takes a minute, the others 5 s: 120 updates are 600 s."""
    file = screen(is_terminal=False)
    progress = console.Progress("training", 4000, "updates", every_s=600)
    for step in range(3, 150):
        clock.seconds += 60 if step == 3 else 5
        progress.update(step, text="[loss] 3.1" if step in (3, 4) else None)
    progress.update(4000, text="done")
    assert file.getvalue().splitlines() == [
        "07:05:09  training 3/4000 updates  [loss] 3.1",  # brackets are no markup
        "07:05:09  training 4/4000 updates  [loss] 3.1  5 h 33 min left",
        "07:05:09  training 124/4000 updates  5 h 23 min left",
        "07:05:09  training 4000/4000 updates  done",
    ]


def test_other_ranks_are_silent(screen, monkeypatch):
    for is_terminal in (False, True):
        file = screen(is_terminal)
        monkeypatch.setattr(say, "enabled", False)
        say("hello")
        console.Progress("training", total=10).update(4, text="loss 3.2")
        assert file.getvalue() == ""


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.2, "0 s"),
        (89.4, "89 s"),
        (90, "2 min"),
        (3000, "50 min"),
        (3 * 3600 + 290, "3 h 05 min"),
        (6_956_340, "80 d 12 h"),
    ],
)
def test_durations_have_readable_units(seconds, text):
    assert console.format_duration(seconds) == text
