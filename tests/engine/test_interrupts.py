from __future__ import annotations

import signal
import threading

import pytest

from headrace.engine.interrupts import DelayedInterrupt


def test_ctrl_c_waits_for_the_check() -> None:
    with DelayedInterrupt() as interrupt:
        interrupt.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
        interrupt.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait() -> None:
    with DelayedInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()


def test_ctrl_c_that_was_never_checked_comes_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), DelayedInterrupt():
        signal.raise_signal(signal.SIGINT)


def test_another_error_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), DelayedInterrupt():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError


def test_a_handler_of_the_program_is_left_alone() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with DelayedInterrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            interrupt.check()
        assert seen == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_nothing() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with DelayedInterrupt() as interrupt:
                interrupt.check()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
