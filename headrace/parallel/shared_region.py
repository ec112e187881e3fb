"""SharedRegion: memory that a parent process and its ranks see, by a file descriptor that is handed on.

    [status of each rank: 8 x int64] [bytes read by each rank: 8 x int64] [ring of bytes]

One cache line a rank and part, so that ranks do not take lines from each other.
"""

from __future__ import annotations

import mmap
import os
import tempfile

_CELLS = 8
_LINE_BYTES = 8 * _CELLS


class SharedRegion:
    """Maps the memory behind ``fd``.

    Args:
        fd: of ``create_fd``, or inherited from who called it.
        num_ranks, ring_bytes: as there.
    """

    def __init__(self, fd: int, num_ranks: int, ring_bytes: int) -> None:
        self.num_ranks = num_ranks
        self.ring_bytes = ring_bytes
        whole = memoryview(mmap.mmap(fd, region_bytes(num_ranks, ring_bytes)))
        lines = 2 * num_ranks * _LINE_BYTES
        self._cells = whole[:lines].cast("q")
        self.ring = whole[lines:]

    def status_cells(self, rank: int) -> memoryview:
        """8 int64 of one rank's ``RankStatus``."""
        return self._cells[rank * _CELLS : (rank + 1) * _CELLS]

    def read_position(self, rank: int) -> memoryview:
        """1 int64: bytes of the ring that the rank has taken since the start."""
        start = (self.num_ranks + rank) * _CELLS
        return self._cells[start : start + 1]


def region_bytes(num_ranks: int, ring_bytes: int) -> int:
    """Size of the whole region."""
    return 2 * num_ranks * _LINE_BYTES + ring_bytes


def create_fd(num_ranks: int, ring_bytes: int) -> int:
    """A descriptor of fresh zeroed memory, which vanishes with its last user."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("headrace-ranks")
    else:
        file, path = tempfile.mkstemp(prefix="headrace-ranks-")
        os.unlink(path)
        fd = file
    os.ftruncate(fd, region_bytes(num_ranks, ring_bytes))
    return fd
