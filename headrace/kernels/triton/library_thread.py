"""LibraryThread: the one thread that calls a library which makes a plan for every new shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch

from headrace.platforms.cuda import current_stream, launching_on, new_stream

logger = logging.getLogger(__name__)


class Lengths(NamedTuple):
    """What a library's plan of dense attention depends on beside the heads.

    is_causal: query i sees keys 0 to i; else every query sees every key.
    """

    num_rows: int
    num_keys: int
    is_causal: bool


class LibraryThread:
    """Calls of lengths that were prepared, and preparing others beside the steps.

    torch keeps cuDNN's plans by thread: what one thread has prepared, another would prepare again, 50 ms for each shape
    and more than a second for the first. So one thread makes both the plans and the calls. Whoever computes a step
    hands it what it would have called and waits until that is queued on the device.

    Only one thing happens at a time: plans are made between ``prepare`` and ``is_idle``, and meanwhile ``has`` says no.
    All methods are called from the thread that computes steps.

    Args:
        device: where calls run.
        make_ready: a first call of some lengths; what it computes is not read.
    """

    def __init__(self, device: torch.device, make_ready: Callable[[Lengths], None]) -> None:
        self._device = device
        self._make_ready = make_ready
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-library")
        self._ready: set[Lengths] = set()
        self._wanted: dict[Lengths, None] = {}
        self._preparing: Future[None] | None = None
        self._is_broken = False

    @property
    def is_idle(self) -> bool:
        """Nothing is being prepared."""
        return self._preparing is None or self._preparing.done()

    def wait(self) -> None:
        """Until nothing is being prepared."""
        if self._preparing is not None:
            self._preparing.result()

    def has(self, lengths: Iterable[Lengths]) -> bool:
        """Whether all can be called now. What is missing is remembered for ``prepare``."""
        if self._is_broken:
            return False
        missing = [one for one in lengths if one not in self._ready]
        self._wanted |= dict.fromkeys(missing)
        return not missing and self.is_idle

    def prepare(self) -> None:
        """Begin to prepare what was missing, in the order of use; returns at once."""
        if self._wanted and self.is_idle and not self._is_broken:
            wanted, self._wanted = list(self._wanted), {}
            self._preparing = self._pool.submit(self._prepare, wanted)

    def close(self) -> None:
        """End the thread, after what it is at: nothing may launch while a process lets go of its device."""
        self._pool.shutdown(wait=True)

    def forget(self) -> None:
        """What was missing until now is not wanted."""
        self._wanted = {}

    def run(self, body: Callable[[], None]) -> None:
        """Run ``body``, which calls the library, on the caller's stream; returns when it has. Raises what it raises."""
        stream = current_stream(self._device) if self._device.type == "cuda" else None
        self._pool.submit(self._run, body, stream).result()

    def _run(self, body: Callable[[], None], stream: torch.Stream | None) -> None:
        where = nullcontext() if stream is None else launching_on(self._device, stream)
        with torch.inference_mode(), where:
            body()

    def _prepare(self, wanted: list[Lengths]) -> None:
        """On a stream of its own, beside the steps."""
        try:
            stream = new_stream(self._device) if self._device.type == "cuda" else None
            for lengths in wanted:
                self._run(partial(self._make_ready, lengths), stream)
                if stream is not None:
                    stream.synchronize()
                self._ready.add(lengths)
        except Exception:
            self._is_broken = True
            logger.warning(
                "attention of the library failed and is not used any more; the engine's own kernels serve all",
                exc_info=True,
            )
