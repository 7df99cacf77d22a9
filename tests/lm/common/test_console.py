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
SHOWN = r"runs/a\x1b[2J\x1b]0;title\x07[red]:m::smile: mixers:M"


def table():
    made = Table("run", title=NAME, caption=NAME)
    made.add_row(NAME)
    return made


@pytest.mark.parametrize("printed", [lambda: NAME, table])
def test_names_are_verbatim_and_control_characters_escaped(capsys, printed):
    say._console = None  # of this test's output
    try:
        say(printed())
    finally:
        say._console = None
    shown = capsys.readouterr().out
    assert SHOWN in shown and "\x1b" not in shown and "\x07" not in shown


def test_line_breaks_and_tabs_are_kept(capsys):
    say._console = None
    say("a\n\tb")
    say._console = None
    assert capsys.readouterr().out.split() == ["a", "b"]


@pytest.fixture
def screen(monkeypatch):
    """Return a function (is_terminal) that captures everything printed in a file."""

    def use(terminal):
        file = io.StringIO()
        fake = Console(file=file, force_terminal=terminal, width=100, highlight=False)
        monkeypatch.setattr(say, "_console", fake)
        monkeypatch.setattr(say, "enabled", True)
        return file

    return use


@pytest.fixture
def now(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    at = datetime(2026, 1, 2, 7, 5, 9)
    monkeypatch.setattr(console, "datetime", SimpleNamespace(now=lambda: at))
    return now


def test_progress_prints_texts_at_once_and_else_rarely(screen, now):
    """The first update takes a minute, the others 5 s."""
    file = screen(terminal=False)
    bar = console.Progress("training", 4000, "updates", every_s=600)
    for step in range(3, 150):
        now.seconds += 60 if step == 3 else 5
        bar.update(step, text="[loss] 3.1" if step in (3, 4) else None)
    bar.update(4000, text="done")
    assert file.getvalue().splitlines() == [
        "07:05:09  training 3/4000 updates  [loss] 3.1",  # no markup: brackets stay
        "07:05:09  training 4/4000 updates  [loss] 3.1  5 h 33 min left",
        "07:05:09  training 124/4000 updates  5 h 23 min left",
        "07:05:09  training 4000/4000 updates  done",
    ]


def test_other_ranks_are_silent(screen, monkeypatch):
    for terminal in (False, True):
        file = screen(terminal)
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
