"""LibraryThread: the one thread that calls a library which makes a plan for every new shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
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

    torch keeps cuDNN's plans by thread: what one thread has prepared, another would prepare again, 0.5 to 1 s for each
    shape and 4.5 s for the first. So one thread makes both the plans and the calls. Whoever computes a step
    hands it what it would have called and waits until that is queued on the device.

    Only one thing happens at a time: a plan is made between ``prepare`` and ``is_idle``, and meanwhile ``has`` says no.
    All methods are called from the thread that computes steps.

    Args:
        device: where calls run.
        make_ready: a first call of some lengths; what it computes is not read.
        usual: lengths that will all be wanted once one of them is, in the order of use.
    """

    def __init__(
        self, device: torch.device, make_ready: Callable[[Lengths], None], usual: Sequence[Lengths] = ()
    ) -> None:
        self._device = device
        self._make_ready = make_ready
        self._usual = dict.fromkeys(usual)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-library")
        self._ready: set[Lengths] = set()
        self._wanted: dict[Lengths, None] = {}
        self._preparing: Future[None] | None = None
        self._stream: torch.Stream | None = None
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
        if any(one in self._usual for one in missing):
            self._wanted |= self._usual
        return not missing and self.is_idle

    def prepare(self) -> bool:
        """Begin to prepare the next of what was missing, in the order of use. Returns at once whether there was any."""
        if not self.is_idle or self._is_broken:
            return False
        wanted = [lengths for lengths in self._wanted if lengths not in self._ready]
        self._wanted = dict.fromkeys(wanted[1:])
        if wanted:
            self._preparing = self._pool.submit(self._prepare, wanted[0])
        return bool(wanted)

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

    def _prepare(self, lengths: Lengths) -> None:
        """On a stream of its own, beside the steps; always the same one, since torch keeps memory by stream."""
        try:
            if self._stream is None and self._device.type == "cuda":
                self._stream = new_stream(self._device)
            self._run(partial(self._make_ready, lengths), self._stream)
            if self._stream is not None:
                self._stream.synchronize()
            self._ready.add(lengths)
        except Exception:
            self._is_broken = True
            logger.warning(
                "attention of the library failed and is not used any more; the engine's own kernels serve all",
                exc_info=True,
            )
