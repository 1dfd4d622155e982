"""Progress is bars on a terminal, a line a stage elsewhere, nothing if quiet."""

import io
import sys

import pytest

from prfaas.cli.progress import shown_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_stage_is_one_line_where_there_is_no_terminal(capsys):
    with shown_progress() as show:
        for done in range(5):
            show("reading", done, 5)
        show("writing", 0, 0)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "reading ...\nwriting ...\n")


def test_a_terminal_gets_a_bar_for_each_stage(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown_progress() as show:
        show("reading", 5, 5)
        show("writing", 1, 4)
    assert "reading" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert "25%" in terminal.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_quiet_shows_nothing(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    with shown_progress(is_quiet=True) as show:
        show("reading", 1, 2)
    assert stream.getvalue() == ""
