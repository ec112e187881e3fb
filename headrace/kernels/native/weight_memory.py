"""WeightMemory: weights one behind another in huge pages.

A decode step reads every weight once, in order; with pages of 4 KiB the core then waits for the page table every few
hundred reads. A matrix alone is smaller than a huge page, so matrices share chunks.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
"""Bytes taken from the system at once; what is not written to costs address space only."""
_ALIGNMENT = 64
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class WeightMemory:
    """Hands out memory that lives as long as any tensor in its chunk: for what is kept as long as the model."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose values are undefined, beginning at a multiple of 64 bytes."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = _take_chunk(max(num_bytes, _CHUNK)), 0
        start = self._used
        self._used = -(-(start + num_bytes) // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[start : start + num_bytes].view(dtype).view(shape)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in this memory."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _take_chunk(num_bytes: int) -> Tensor:
    """uint8, beginning at a huge page."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE_PAGES is not None:
        with contextlib.suppress(OSError):  # a kernel built without them: ordinary pages do, more slowly
            memory.madvise(_HUGE_PAGES)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    return torch.frombuffer(memory, dtype=torch.uint8)[start : start + num_bytes]


WEIGHT_MEMORY = WeightMemory()
"""Of this process."""
