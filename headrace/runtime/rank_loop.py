"""RankLoop: what a rank does all day: take a message, do it, report."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from headrace.core.token_mask import TokenMask
from headrace.errors import EngineDeadError, HeadraceError
from headrace.parallel.broadcast import Receiver
from headrace.parallel.launch import LaunchPlace
from headrace.parallel.rank_status import RankStatus
from headrace.runtime.executor import PendingStep
from headrace.runtime.rank_messages import (
    CheckWeights,
    RankBeat,
    RankFailed,
    RankOutput,
    RankProgress,
    RankReady,
    RankSpec,
    RankVoice,
    RankWeights,
    RunStep,
    Sample,
    Stop,
    ToRank,
    UpdateWeights,
)

logger = logging.getLogger(__name__)

_BEAT_S = 0.5


class RankLoop:
    """Serves one rank over its socket.

    Args:
        rank: which.
        rank_socket: to the executor.
        receiver: the executor's messages.
        status: where the rank says what it does.
        sends_beats: tell the executor the status through the socket, as it cannot see it.
    """

    def __init__(
        self,
        rank: int,
        rank_socket: socket.socket,
        receiver: Receiver,
        status: RankStatus,
        sends_beats: bool = False,
    ) -> None:
        self._rank = rank
        self._receiver = receiver
        self._status = status
        self._voice = RankVoice(rank_socket)
        self._sends_beats = sends_beats
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        self._launched: queue.SimpleQueue[PendingStep] = queue.SimpleQueue()

    def run(self) -> int:
        """Load, then serve until told to stop or left alone. Returns 0, or 1 after a failure that was reported."""
        _start_thread(self._beat, "beat", _main_thread_clock())
        try:
            spec = self._receive()
            if isinstance(spec, RankSpec):
                self._serve(self._load(spec))
            return 0
        except Exception as error:
            self._report(error)
            return 1

    def _receive(self) -> ToRank | None:
        message = self._receiver.receive()
        return None if message is None else self._decoder.decode(message)

    def _load(self, spec: RankSpec) -> Any:
        from headrace.parallel.meeting import open_store
        from headrace.parallel.world import World
        from headrace.platforms.base import current_platform
        from headrace.runtime.worker import Worker

        config = spec.config
        local_rank, num_local_ranks = self._rank, spec.num_local_ranks
        if not num_local_ranks:
            place = LaunchPlace.read(os.environ)
            local_rank, num_local_ranks = place.local_rank, place.num_local_ranks
        platform = current_platform(config.device.device, local_rank)
        self._tell_progress("meeting the other ranks", 0.0)
        world = World.join(
            config.parallel,
            self._rank,
            store=open_store(spec.rendezvous, config.parallel.world_size),
            device=platform.device,
            local_rank=local_rank,
            num_local_ranks=num_local_ranks,
            status=self._status,
        )
        worker = Worker(
            config.model,
            config.cache,
            config.scheduler,
            config.parallel,
            config.device,
            progress=self._tell_progress,
            world=world,
        )
        if world.reports:
            _start_thread(self._report_results, "results")
        self._reports, self._meet = world.reports, partial(world.smallest, 0)
        self._voice.send(
            RankReady(
                worker.kv_cache_specs(),
                worker.num_kv_blocks(),
                worker.weight_bytes_read,
                worker.num_kv_blocks() * worker.kv_cache_specs()[0].bytes_per_block,
                worker.loaded_memory_bytes,
                platform.describe(),
                worker.startup_s,
            )
        )
        return worker

    def _serve(self, worker: Any) -> None:
        status = self._status
        while True:
            message = self._receive()
            if isinstance(message, RunStep):
                status.begin_step(message.scheduler_output.step_id)
                worker.execute_model(message.scheduler_output)
            elif isinstance(message, Sample):
                pending = worker.sample_tokens(_mask_of(message))
                status.end_step()
                if self._reports:
                    self._launched.put(pending)
            elif isinstance(message, CheckWeights):
                self._check_weights(worker, message.model)
            elif isinstance(message, UpdateWeights):
                update_all_or_fail(worker, message.model, self._tell_progress)
                self._voice.send(RankWeights())
            else:
                if isinstance(message, Stop):
                    self._meet()  # steps in flight run to their end everywhere, without complaints of who has left
                return

    def _check_weights(self, worker: Any, model: str | None) -> None:
        try:
            worker.check_weights(model)
        except HeadraceError as error:
            self._voice.send(RankWeights(type(error).__name__, str(error)))
        else:
            self._voice.send(RankWeights())

    def _report_results(self) -> None:
        """Runs in a thread of its own, so that waiting for the device never keeps the next step from it."""
        try:
            while True:
                self._voice.send(RankOutput(self._launched.get().finish()))
        except Exception as error:
            self._report(error)

    def _tell_progress(self, stage: str, share: float) -> None:
        self._voice.send(RankProgress(stage, share))

    def _report(self, error: Exception) -> None:
        logger.error("the rank fails: %s", error)
        try:
            self._voice.send(RankFailed(type(error).__name__, str(error), traceback.format_exc()))
        except OSError:
            logger.error("nobody is left to be told")

    def _beat(self, clock: int | None) -> None:
        try:
            while True:
                busy_s = time.process_time() if clock is None else time.clock_gettime(clock)
                times = os.times()
                busy_s += times.children_user + times.children_system  # compilers that it waits for
                self._status.beat(int(busy_s * 1e3))
                if self._sends_beats:
                    self._voice.send(RankBeat(self._status.numbers()))
                time.sleep(_BEAT_S)
        except OSError:
            return  # the executor is gone, as the main thread will see


def update_all_or_fail(worker: Any, model: str | None, progress: Callable[[str, float], None]) -> None:
    """Ranks have either all the new weights or none of them goes on. Raises EngineDeadError."""
    try:
        worker.update_weights(model, progress)
    except Exception as error:
        raise EngineDeadError(f"its weights could not be replaced: {error}") from error


def _main_thread_clock() -> int | None:
    """The CPU clock of the thread that computes; None where the system has none for threads."""
    ident = threading.main_thread().ident
    if not hasattr(time, "pthread_getcpuclockid") or ident is None:
        return None
    return time.pthread_getcpuclockid(ident)


def _start_thread(target: Any, name: str, *args: Any) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()


def _mask_of(message: Sample) -> TokenMask | None:
    if message.mask is None:
        return None
    words = np.frombuffer(
        bytearray(message.mask), np.uint32
    )  # a tensor is made of it, which wants its own memory
    return TokenMask(np.array(message.rows, np.int64), words.reshape(len(message.rows), -1))
