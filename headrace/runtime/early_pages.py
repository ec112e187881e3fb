"""EarlyPages: pages of a CPU's KV memory that are had from the system while nothing is computed.

Linux hands memory out when it is first touched, which is in the middle of a step: 32 prompts and their answers touch
some 60,000 pages. One takes 2 us, and 20 us in a virtual machine that gives free memory back to its host: a tenth of
such a burst. Only what comes next is taken early, so that an engine that has little to do stays small.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable

import torch

AHEAD_BYTES = 32 << 20
"""At each end of the free blocks: a quarter of what such a burst takes with a model of 135M parameters. Twice as much
would be a little faster there, but an idle engine is to stay within the weights and 450 MB."""

PIECE_BYTES = 1 << 20
"""Had at a time: 5 ms where pages are slow, for so long may a request wait for it."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; contents stay

Populate = Callable[[int, int], bool]
"""(address, bytes) -> whether all of them have their pages now."""


class EarlyPages:
    """Of blocks that are taken from both ends (``BlockPool``).

    Args:
        blocks: [num_blocks, bytes] on the CPU; its memory outlives this.
    """

    def __init__(self, blocks: torch.Tensor, populate: Populate | None = None) -> None:
        self._address, self._block_bytes = blocks.data_ptr(), blocks.stride(0)
        self._ahead = AHEAD_BYTES // self._block_bytes
        self._piece = max(1, PIECE_BYTES // self._block_bytes)
        self._low, self._high = 0, len(blocks)  # what is below, and from there on, needs nothing
        self._populate = populate or _populate

    def take(self, lowest: int, highest: int) -> bool:
        """Have a piece more.

        Args:
            lowest, highest: no block below, or above, is free.

        Returns: False: all that comes next has its pages, or this system cannot give them.
        """
        low, high = max(self._low, lowest), min(self._high, highest + 1)
        if low < min(lowest + self._ahead, high):
            start, end = low, min(low + self._piece, high)
            self._low = end
        elif high > max(highest + 1 - self._ahead, low):
            start, end = max(high - self._piece, low), high
            self._high = start
        else:
            return False
        return self._populate(self._address + start * self._block_bytes, (end - start) * self._block_bytes)


def _populate(address: int, num_bytes: int) -> bool:
    if sys.platform != "linux":
        return False
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = ctypes.c_size_t(address + num_bytes - start)
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(start), length, _POPULATE_WRITE) == 0
