"""Runs a function on several ranks of this host, each a process: for benchmarks that look into a rank."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

from headrace.config import ParallelConfig
from headrace.parallel.meeting import open_store
from headrace.parallel.rank_status import RankStatus
from headrace.parallel.world import World
from headrace.platforms.base import current_platform

Work = Callable[..., None]


def run_on_ranks(work: Work, parallel: ParallelConfig, device: str, *args: Any) -> None:
    """``work(world, *args)`` on every rank. Raises SystemExit when one fails."""
    size = parallel.world_size
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may resolve to nothing
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_start, args=(work, parallel, device, rank, f"file://{folder}/store", args)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed")


def _start(
    work: Work, parallel: ParallelConfig, device: str, rank: int, store: str, args: tuple[Any, ...]
) -> None:
    platform = current_platform(device, rank)  # type: ignore[arg-type]
    world = World.join(
        parallel,
        rank,
        store=open_store(store, parallel.world_size),
        device=platform.device,
        local_rank=rank,
        num_local_ranks=parallel.world_size,
        status=RankStatus(),
    )
    work(world, platform.device, *args)
