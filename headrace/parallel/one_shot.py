"""OneShotCommunicator: small sums in one kernel, over memory that all GPUs of a host see.

Each GPU reads all parts and adds them up itself (torch's symmetric memory, "one-shot": no multicast). That moves more
bytes than NCCL's rings do, but starts sooner: what decides for the few rows of a decode step. From which size on NCCL
is faster is measured when the engine starts, the way steps run: inside a CUDA graph.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from headrace.errors import ConfigError
from headrace.parallel.state import Communicator
from headrace.platforms.cuda import graph_ms

logger = logging.getLogger(__name__)

MAX_BYTES = 8 << 20
_MIN_BYTES = 1 << 12
_SAFE_SIZES = (2, 4, 8)
"""Numbers of ranks for which torch's kernel adds in one order everywhere."""


_DTYPES = (torch.float32, torch.bfloat16)
"""Types that torch's kernel adds."""


class OneShotCommunicator:
    """Sums of up to ``max_bytes`` bytes in one shot, all else by ``inner``.

    Args:
        inner: the library's collectives over the same ranks.
        group: the ranks, all on one host.
        device: this rank's GPU.

    Raises: RuntimeError when the GPUs cannot see each other's memory.
    """

    def __init__(self, inner: Communicator, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._inner = inner
        self._group = group
        self._name = group.group_name
        self._buffer: torch.Tensor = symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._buffer, group)
        self._sum: Any = torch.ops.symm_mem.one_shot_all_reduce_copy_out
        self.max_bytes = MAX_BYTES

    def shared_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed memory that all ranks see: (this rank's, [ranks] int64: the addresses of everyone's).

        All ranks call it together.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        own: torch.Tensor = symmetric_memory.empty(shape, dtype=dtype, device=self._buffer.device)
        handle = symmetric_memory.rendezvous(own, self._group)
        own.zero_()
        peers = range(dist.get_world_size(self._group))
        addresses = [handle.get_buffer(peer, shape, dtype).data_ptr() for peer in peers]
        dist.all_reduce(
            torch.zeros(1, dtype=torch.float32, device="cpu"), group=self._group
        )  # nobody writes before all have cleared theirs
        return own, torch.tensor(addresses, dtype=torch.int64, device=own.device)

    def all_reduce(self, x: torch.Tensor) -> None:
        """See ``Communicator``."""
        num_bytes = x.numel() * x.element_size()
        if num_bytes > self.max_bytes or x.dtype not in _DTYPES:
            self._inner.all_reduce(x)
        else:
            flat = x.view(-1)
            self._sum(self._buffer[:num_bytes].view(x.dtype), flat, "sum", self._name, flat)

    def smallest(self, number: int) -> int:
        """Of all ranks' numbers."""
        everyone = torch.tensor([number], dtype=torch.int64, device="cpu")
        dist.all_reduce(everyone, dist.ReduceOp.MIN, group=self._group)
        return int(everyone)

    def all_agree(self, verdict: bool) -> bool:
        """Whether it is true on every rank."""
        return bool(self.smallest(int(verdict)))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Communicator``."""
        self._inner.all_gather(x, out)


def choose_all_reduce(
    wanted: str, inner: Communicator, group: dist.ProcessGroup, device: torch.device, is_one_host: bool
) -> Communicator:
    """The collectives for a tensor-parallel group of GPUs.

    Args:
        wanted: "auto" and "fused" measure (and keep the symmetric memory, which the fused form needs, whatever the
            outcome); "library" is NCCL alone, "one-shot" takes one shot for all small sums.

    Raises: ConfigError when one shot is asked for and cannot be had.
    """
    size = dist.get_world_size(group)
    reason = None
    if wanted == "library":
        return inner
    if not is_one_host:
        reason = "the ranks are on several hosts"
    elif size not in _SAFE_SIZES:
        reason = f"tensor_parallel_size is {size}, and only {_SAFE_SIZES} add in one order everywhere"
    else:
        try:
            return _measured(wanted, OneShotCommunicator(inner, group, device), inner, group, device)
        except (RuntimeError, AttributeError, ImportError) as error:
            reason = str(error)
    if wanted == "one-shot":
        raise ConfigError(f"all_reduce='one-shot' cannot be had: {reason}; use 'auto' or 'library'")
    logger.info("sums go through NCCL alone: %s", reason)
    return inner


def _measured(
    wanted: str,
    one_shot: OneShotCommunicator,
    inner: Communicator,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Communicator:
    """One shot up to the size at which it stops being faster, the same on all ranks."""
    if not _agrees(one_shot, inner, group, device):
        raise RuntimeError("one-shot sums differ between ranks or from NCCL's")
    if wanted == "one-shot":
        return one_shot
    limit, num_bytes = 0, _MIN_BYTES
    while num_bytes <= MAX_BYTES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        candidates = (one_shot, inner)
        times = torch.tensor(
            [graph_ms(partial(each.all_reduce, x)) for each in candidates], dtype=torch.float32, device="cpu"
        )
        dist.all_reduce(times, group=group)
        if times[0] >= times[1]:
            break
        logger.info(
            "sum of %d bytes: one shot %.4f ms, NCCL %.4f ms",
            num_bytes,
            *(times / dist.get_world_size(group)),
        )
        limit, num_bytes = num_bytes, 2 * num_bytes
    one_shot.max_bytes = limit
    logger.info("sums up to %d bytes in one shot", limit)
    return one_shot


def _agrees(
    one_shot: OneShotCommunicator, inner: Communicator, group: dist.ProcessGroup, device: torch.device
) -> bool:
    """Whether a sum is the same bits on all ranks, and near the library's."""
    generator = torch.Generator(device).manual_seed(dist.get_rank(group))
    mine = torch.randn(8, 1024, dtype=torch.bfloat16, device=device, generator=generator)
    ours, theirs = mine.clone(), mine.clone()
    one_shot.all_reduce(ours)
    inner.all_reduce(theirs)
    everywhere = ours.new_empty((8, 1024 * dist.get_world_size(group)))
    inner.all_gather(ours, everywhere)
    is_same = bool((everywhere.view(8, -1, 1024) == ours[:, None]).all())
    is_near = bool(torch.allclose(ours.float(), theirs.float(), atol=0.1, rtol=0.02))
    return one_shot.all_agree(is_same and is_near)
