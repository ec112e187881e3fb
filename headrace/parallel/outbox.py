"""Outbox: tensors on their way to other ranks, kept until they are there."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

_MOST = 16
"""On their way at a time. The receiver asks for each without waiting for later ones, so waiting for the oldest ends."""


class Outbox:
    """Sends without waiting for the receiver.

    Args:
        group: the ranks; None: all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """To a rank; nobody may write to the tensor any more."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        while len(self._sent) >= _MOST:  # gloo learns of the end by waiting for it only
            self._sent.popleft()[0].wait()
        work = dist.isend(tensor, target, group=self._group)
        assert work is not None, "this rank belongs to the group"
        self._sent.append((work, tensor))
