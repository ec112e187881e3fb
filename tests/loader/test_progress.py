from __future__ import annotations

import io
import sys

import pytest

from headrace.loader.progress import ProgressBar


def test_draws_in_place_and_ends_its_line_once() -> None:
    stream = io.StringIO()
    bar = ProgressBar("Loading", stream)
    for done in range(2001):
        bar(done * 1000, 2_000_000)
    bar(2_000_000, 2_000_000)
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.endswith("100% 2.0/2.0 MB\n")
    assert text.count("\r") < 50, "redraws are limited"
    assert text.startswith("\rLoading [                        ]   0% 0.0/2.0 MB")


def test_a_total_that_is_passed_or_zero_stays_sane() -> None:
    for done, total in ((3, 2), (0, 0)):
        stream = io.StringIO()
        ProgressBar("Loading", stream)(done, total)
        assert "100%" in stream.getvalue()


@pytest.mark.parametrize(
    ("is_terminal", "is_wanted", "expected"),
    [(True, None, True), (False, None, False), (False, True, True), (True, False, False)],
)
def test_only_on_a_terminal_or_when_asked(
    is_terminal: bool, is_wanted: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert (ProgressBar.if_wanted("Loading", is_wanted) is not None) == expected


def test_stdout_stays_clean(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressBar("Loading")(5, 5)
    captured = capsys.readouterr()
    assert captured.out == "" and "Loading" in captured.err
