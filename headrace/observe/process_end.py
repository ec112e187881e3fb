"""How another process ended, in words that say what to look at."""

from __future__ import annotations

import signal

_HINTS = {
    signal.SIGKILL: " (the system may have run out of memory)",
    signal.SIGBUS: " (a file that it had mapped may have been cut: replace model files by renaming, never in place; "
    "or shared memory, /dev/shm, is full)",
}


def describe_end(code: int) -> str:
    """From an exit status as ``subprocess`` gives it: "was ended by SIGKILL (…)", "ended with status 1; …"."""
    if code >= 0:
        return f"ended with status {code}; its messages on standard error say why"
    try:
        ended_by = signal.Signals(-code)
    except ValueError:  # real-time ones have no names, but the first and the last
        return f"was ended by signal {-code}"
    return f"was ended by {ended_by.name}{_HINTS.get(ended_by, '')}"
