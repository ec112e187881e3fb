"""TorchCommunicator: the collectives of one group of ranks over torch.distributed (gloo on CPUs, NCCL on GPUs)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from headrace.parallel.state import Communicator


class TorchCommunicator:
    """Collectives are called by all ranks of the group in the same order. On GPUs they are queued on the current
    stream and may be captured in a graph; on CPUs they return when done.

    Sums are the same bits on every rank (each part is added up once and sent around), on which it rests that all ranks
    sample the same tokens.

    Args:
        group: its ranks.
        size: how many.
        device_type: "cpu" or "cuda".
    """

    def __init__(self, group: dist.ProcessGroup, size: int, device_type: str) -> None:
        self._group = group
        self._size = size
        self._is_cpu = device_type == "cpu"

    def all_reduce(self, x: torch.Tensor) -> None:
        """x = sum of all ranks' x, in place. x is contiguous."""
        dist.all_reduce(x, group=self._group)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [R, size * n] = all ranks' x [R, n] side by side."""
        num_rows, width = x.shape
        # one row's parts are side by side as they come
        parts = out.view(-1, 1, width) if num_rows == 1 else x.new_empty((self._size, num_rows, width))
        if self._is_cpu:
            dist.all_gather(list(parts.unbind()), x, group=self._group)
        else:
            dist.all_gather_into_tensor(parts.view(-1, width), x, group=self._group)
        if num_rows != 1:
            out.view(num_rows, self._size, width).copy_(parts.permute(1, 0, 2))


class WatchedCommunicator:
    """Tells, around each collective, that this rank waits for others: so a watcher can tell who is late.

    Args:
        inner: does the work.
        enter, leave: called before and after; they must be cheap.
    """

    def __init__(self, inner: Communicator, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self.inner = inner
        self._enter = enter
        self._leave = leave

    def all_reduce(self, x: torch.Tensor) -> None:
        """See ``Communicator``."""
        self._enter()
        self.inner.all_reduce(x)
        self._leave()

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Communicator``."""
        self._enter()
        self.inner.all_gather(x, out)
        self._leave()
