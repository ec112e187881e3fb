"""A move of blocks that goes on beside the engine's thread."""

from __future__ import annotations


class BlockTransfer:
    """Written by the thread that moves, read by the engine's; ``is_done`` is set last.

    num_done: blocks moved, counted from the first; fewer than asked for when something failed.
    elapsed_ms: time that the moving took, without waiting for its turn.
    """

    __slots__ = ("elapsed_ms", "is_done", "num_done")

    def __init__(self) -> None:
        self.is_done = False
        self.num_done = 0
        self.elapsed_ms = 0.0

    def finish(self, num_done: int, elapsed_ms: float) -> None:
        """The move is over."""
        self.num_done, self.elapsed_ms = num_done, elapsed_ms
        self.is_done = True
