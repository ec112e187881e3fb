"""Arena: the activations of a forward, reserved by name and reused every step."""

from __future__ import annotations

import torch


class Buffer:
    """Rows of one width that every step writes anew; ``rows(n)`` is a view of the first n.

    It grows when a step is larger than any before, so that a small engine stays small; ``Arena.reserve`` grows all
    buffers ahead of time, after which their addresses stay.
    """

    def __init__(self, name: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        self.width = width
        self._memory = torch.empty((0, width), dtype=dtype, device=device)
        self._view = self._memory

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""
        return self._memory.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes reserved now."""
        return self._memory.numel() * self._memory.element_size()

    def rows(self, num_rows: int) -> torch.Tensor:
        """View [num_rows, width] of the memory; the same object while the number stays."""
        if num_rows != self._view.shape[0]:
            self.reserve(num_rows)
            self._view = self._memory[:num_rows]
        return self._view

    def reserve(self, num_rows: int) -> None:
        """Make room for so many rows; what they held is lost."""
        if num_rows > self._memory.shape[0]:
            shape = (num_rows, self.width)
            self._memory = torch.empty(shape, dtype=self._memory.dtype, device=self._memory.device)
            self._view = self._memory


class Arena:
    """Buffers by (name, width, dtype): layers that ask for the same one share it, since they run one after another."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._buffers: dict[tuple[str, int, torch.dtype], Buffer] = {}

    def buffer(self, name: str, width: int, dtype: torch.dtype) -> Buffer:
        """The buffer of that name, width and dtype."""
        key = (name, width, dtype)
        if key not in self._buffers:
            self._buffers[key] = Buffer(name, width, dtype, self._device)
        return self._buffers[key]

    def buffers(self) -> list[Buffer]:
        """All buffers."""
        return list(self._buffers.values())

    def reserve(self, num_rows: int) -> None:
        """Make room for steps of so many tokens in every buffer."""
        for buffer in self._buffers.values():
            buffer.reserve(num_rows)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved by all buffers."""
        return sum(buffer.num_bytes for buffer in self._buffers.values())
