from __future__ import annotations

import io
import logging
import re

import pytest

from headrace.cli.main import StderrHandler
from headrace.engine.progress import AnswerBar, LoadBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself: pytest sets its own stderr between fixtures and test."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_load_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with LoadBar() as bar:
        bar("reading weights", 0.5)
        bar("reading weights", 1.0)
    assert "reading weights" in terminal.getvalue()


def test_load_bar_is_silent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with LoadBar() as bar:
        bar("reading weights", 0.5)
    assert stream.getvalue() == ""


def test_answer_bar_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with AnswerBar(2, is_shown=True) as bar:
        bar.finished_one(10)
        bar.finished_one(20)
    assert "2/2" in terminal.getvalue() and "30 tokens, " in terminal.getvalue()
    assert "tok/s" in terminal.getvalue()


def test_answer_bar_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with AnswerBar(2, is_shown=False) as bar:
        bar.finished_one(10)
    assert terminal.getvalue() == ""


def test_an_error_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError), AnswerBar(2, is_shown=True):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), LoadBar():
        raise ZeroDivisionError


def test_a_log_message_gets_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    handler = StderrHandler()
    with LoadBar() as bar:
        bar("reading weights", 0.5)
        handler.emit(logging.makeLogRecord({"msg": "beside the bar"}))
    before, _, after = terminal.getvalue().partition("beside the bar")
    assert re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", before).endswith("\r") and after.startswith("\n")
    assert before.endswith("\x1b[2K")  # the bar was wiped from that line first
