"""Runs a function on several ranks of this host, each a process: for benchmarks that look into a rank."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from headrace.config import ParallelConfig
from headrace.parallel.meeting import open_store
from headrace.parallel.rank_status import RankStatus
from headrace.parallel.world import World
from headrace.platforms.base import current_platform

Work = Callable[..., None]


class WaitClock(RankStatus):
    """A rank's status that also adds up how long the rank was in collectives, as its host sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0
        self._since_s = 0.0

    def enter_wait(self) -> None:
        self._since_s = time.perf_counter()

    def leave_wait(self) -> None:
        self.waited_s += time.perf_counter() - self._since_s


def run_on_ranks(work: Work, parallel: ParallelConfig, device: str, *args: Any, limit_s: float = 500) -> None:
    """``work(world, device, clock, *args)`` on every rank.

    Raises SystemExit when one fails, or when they are not done in time: the others would wait for it for ever.
    """
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
        deadline_s = time.monotonic() + limit_s
        running = list(processes)
        while running and not any(process.exitcode for process in processes):
            if not wait([process.sentinel for process in running], max(0.0, deadline_s - time.monotonic())):
                break
            running = [process for process in running if process.exitcode is None]
        for process in running:
            process.kill()
            process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if failed:
        why = "failed, or were ended since another did" if len(running) < size else f"took over {limit_s} s"
        raise SystemExit(f"ranks {failed} {why}")


def _start(
    work: Work, parallel: ParallelConfig, device: str, rank: int, store: str, args: tuple[Any, ...]
) -> None:
    platform = current_platform(device, rank)  # type: ignore[arg-type]
    clock = WaitClock()
    world = World.join(
        parallel,
        rank,
        store=open_store(store, parallel.world_size),
        device=platform.device,
        local_rank=rank,
        num_local_ranks=parallel.world_size,
        status=clock,
    )
    work(world, platform.device, clock, *args)
    world.smallest(0)  # all have come so far: nobody ends while another still talks to it
    sys.stdout.flush()
    os._exit(0)  # not by way of the interpreter's end: communicators would wait for ranks that are gone
