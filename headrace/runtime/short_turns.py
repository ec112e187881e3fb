"""short_turns: threads hand Python's lock over more often while some compile and another launches.

A launch gives the lock away for a moment, and gets it back only when each thread that waits for it has had a turn of
5 ms, as Python has it: with kernels being compiled in eight threads, a step of 280 launches takes seconds instead of
a tenth of one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 1e-4

_lock = threading.Lock()
_num_holders = 0
_usual_s = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Turns of ``TURN_S`` at most, in all threads, until the last context has ended."""
    global _num_holders, _usual_s
    with _lock:
        if _num_holders == 0:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(TURN_S, _usual_s))
        _num_holders += 1
    try:
        yield
    finally:
        with _lock:
            _num_holders -= 1
            if _num_holders == 0:
                sys.setswitchinterval(_usual_s)
