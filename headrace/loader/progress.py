"""ProgressBar: one line on stderr while weights load; stdout stays clean."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 24
_MIN_INTERVAL_S = 0.1


class ProgressBar:
    """Draws ``label [####    ] 40% 1.2/3.0 GB`` in place. Is called with (bytes done, bytes in all)."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._drawn_at = float("-inf")
        self._is_done = False

    @classmethod
    def if_wanted(cls, label: str, is_wanted: bool | None = None) -> ProgressBar | None:
        """A bar, or None: without an answer to ``is_wanted``, there is one when stderr is a terminal."""
        wanted = sys.stderr.isatty() if is_wanted is None else is_wanted
        return cls(label) if wanted else None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Redraws, at most ten times a second; ends the line when all is done."""
        now, is_last = time.monotonic(), done_bytes >= total_bytes
        if self._is_done or (not is_last and now - self._drawn_at < _MIN_INTERVAL_S):
            return
        self._drawn_at, self._is_done = now, is_last
        share = min(done_bytes / total_bytes, 1.0) if total_bytes else 1.0
        bar = "#" * int(share * _WIDTH)
        unit, scale = ("GB", 1e9) if total_bytes >= 1e9 else ("MB", 1e6)
        sizes = f"{min(done_bytes, total_bytes) / scale:.1f}/{total_bytes / scale:.1f} {unit}"
        line = f"\r{self._label} [{bar:<{_WIDTH}}] {share:4.0%} {sizes}"
        self._stream.write(line + ("\n" if is_last else ""))
        self._stream.flush()
