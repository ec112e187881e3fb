"""Turns are short while somebody needs them, and as before afterwards."""

from __future__ import annotations

import sys

import pytest

from headrace.runtime.short_turns import TURN_S, short_turns


def test_the_usual_turn_comes_back_with_the_last_holder() -> None:
    usual = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() == pytest.approx(TURN_S)
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(TURN_S)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_shorter_turns_stay_and_a_failure_ends_them() -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S / 2)
    try:
        with pytest.raises(ValueError), short_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S / 2, abs=2e-6)
            raise ValueError
        assert sys.getswitchinterval() == pytest.approx(TURN_S / 2, abs=2e-6)
    finally:
        sys.setswitchinterval(usual)
