"""Ctrl-C at a safe moment."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DelayedInterrupt:
    """While entered, Ctrl-C waits for ``check``, so that it never falls into the middle of an engine step.

    A second Ctrl-C interrupts at once. Outside the main thread signals do not arrive and this does nothing.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._previous: Any = None

    def __enter__(self) -> DelayedInterrupt:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C came."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if kind is None:
                self.check()
