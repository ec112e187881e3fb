"""Ranks as threads of one process, with real collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from headrace.parallel.state import ParallelState

T = TypeVar("T")


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[torch.Tensor | None] = [None] * size


class ThreadCommunicator:
    """One rank's end. Every rank must call the same collectives in the same order.

    ``gathered`` has the bytes that each ``all_gather`` brought from this rank.
    """

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self.gathered: list[int] = []

    def all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.gathered.append(x.numel() * x.element_size())
        out.copy_(torch.cat(self._exchange(x), dim=-1))

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.brought[self._rank] = x.clone()
        self._meeting.barrier.wait()
        everything = [tensor for tensor in self._meeting.brought if tensor is not None]
        self._meeting.barrier.wait()
        return everything


def run_ranks(size: int, work: Callable[[ParallelState], T]) -> list[T]:
    """``work`` on every rank at once; the results in rank order."""
    meeting = _Meeting(size)

    def on_rank(rank: int) -> T:
        try:
            with torch.no_grad():
                return work(ParallelState(rank, size, ThreadCommunicator(meeting, rank)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on_rank, range(size)))
