"""MultiprocExecutor: one engine over several ranks, each a process with a device of its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

import numpy as np

from headrace.config import EngineConfig
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import ModelRunnerOutput, SchedulerOutput
from headrace.core.token_mask import TokenMask
from headrace.errors import CheckpointError, EngineDeadError, HeadraceError, error_class
from headrace.parallel.launch import LaunchPlace
from headrace.parallel.world import describe_rank
from headrace.runtime.external_ranks import await_external_ranks, rendezvous_of
from headrace.runtime.rank_group import RankGroup
from headrace.runtime.rank_messages import (
    CheckWeights,
    FromRank,
    RankOutput,
    RankProgress,
    RankReady,
    RankSpec,
    RankWeights,
    RunStep,
    Sample,
    UpdateWeights,
)
from headrace.runtime.rank_peer import start_local_ranks

logger = logging.getLogger(__name__)


class MultiprocExecutor:
    """Broadcasts each step's delta to all ranks; one of them reports what was sampled, which all have sampled alike.

    Futures complete in step order. When a rank dies, fails or hangs, all ranks are ended, and every future that is not
    done, and every later call, raises EngineDeadError with the rank's name and its last step.

    Args:
        config: of the engine; ``parallel`` says how many ranks.
        progress: called with (stage, share done in [0, 1]) while the first rank loads.
        place: rank 0 of a launch whose other ranks come by themselves; None: start all ranks on this host.

    Raises: CheckpointError, ConfigError, and EngineDeadError when a rank dies or hangs while loading.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str, float], None] | None = None,
        place: LaunchPlace | None = None,
    ) -> None:
        parallel = config.parallel
        self._num_ranks = parallel.world_size
        self._pending: deque[Future[ModelRunnerOutput]] = deque()
        self._lock = threading.Lock()
        self._loading: queue.SimpleQueue[tuple[int, FromRank] | HeadraceError] = queue.SimpleQueue()
        self._is_shut_down = False
        self._folder = tempfile.mkdtemp(prefix="headrace-ranks-")
        rendezvous, num_local_ranks = f"file://{self._folder}/rendezvous", self._num_ranks
        if place is None:
            self._peers, region = start_local_ranks(self._num_ranks, is_whole=True)
        else:
            others, self._store = await_external_ranks(place)
            own, region = start_local_ranks(1, is_whole=False)
            self._peers = own + others
            rendezvous, num_local_ranks = rendezvous_of(place), 0
        self._group = RankGroup(
            self._peers,
            region,
            timeout_s=parallel.rank_timeout_s,
            load_timeout_s=parallel.rank_load_timeout_s,
            describe=lambda rank: describe_rank(
                rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
            ),
            on_message=self._on_message,
            on_failure=self._on_failure,
            awaits_results=lambda: bool(self._pending),
        )
        self._ready: dict[int, RankReady] = {}
        try:
            self._group.send(RankSpec(config, rendezvous, num_local_ranks))
            self._await_ready(progress)
        except BaseException:
            self.shutdown()
            raise

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The model's KV groups, as the first rank holds them."""
        return self._ready[0].specs

    def num_kv_blocks(self) -> int:
        """Blocks that were allocated on every rank."""
        return self._ready[0].num_kv_blocks

    def update_weights(self, model: str | None) -> None:
        """Replace every rank's part of the weights; no step may be outstanding. See ``Executor``.

        Raises: what the first rank says that cannot use them; EngineDeadError when one fails while they are replaced.
        """
        self.check_alive()
        self._group.send(CheckWeights(model))
        for rank, answer in sorted(self._weights_answers().items()):
            if answer.kind:
                error = (error_class(answer.kind) or CheckpointError)(answer.message)
                logger.info("rank %d refuses other weights: %s", rank, error)
                raise error
        self._group.send(UpdateWeights(model))
        try:
            self._weights_answers()
        except EngineDeadError:
            raise
        except HeadraceError as error:
            raise EngineDeadError(str(error)) from error

    def _weights_answers(self) -> dict[int, RankWeights]:
        """What each rank answers. Raises what ended the ranks."""
        answers: dict[int, RankWeights] = {}
        while len(answers) < self._num_ranks:
            news = self._loading.get()
            if isinstance(news, HeadraceError):
                raise news
            if isinstance(news[1], RankWeights):
                answers[news[0]] = news[1]
        return answers

    def rank_reports(self) -> list[RankReady]:
        """What each rank said of its memory when it was ready."""
        return [self._ready[rank] for rank in range(self._num_ranks)]

    @property
    def is_compiling(self) -> bool:
        """Ranks wait for themselves; no call here does."""
        return False

    def take_pages(self, lowest: int, highest: int) -> bool:
        """Ranks have theirs as they go."""
        return False

    def rank_memory_bytes(self) -> list[int]:
        """What each rank held on its device when it was ready."""
        return [report.memory_bytes for report in self.rank_reports()]

    def startup_s(self) -> dict[str, float]:
        """Seconds of each stage of the start, of the rank that took longest for it."""
        longest: dict[str, float] = {}
        for report in self.rank_reports():
            for name, seconds in report.startup_s.items():
                longest[name] = max(seconds, longest.get(name, 0.0))
        return longest

    def pids(self) -> list[int]:
        """Process ids of the ranks that run on this host, in order."""
        return [peer.process.pid for peer in self._peers if peer.process is not None]

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Start the forward of one step. Raises EngineDeadError if a rank has failed."""
        self.check_alive()
        self._group.send(RunStep(scheduler_output))
        started: Future[None] = Future()
        started.set_result(None)  # what goes wrong with it shows in the samples
        return started

    def sample_tokens(self, mask: TokenMask | None) -> Future[ModelRunnerOutput]:
        """Sample for the step last executed. Raises EngineDeadError if a rank has failed."""
        self.check_alive()
        future: Future[ModelRunnerOutput] = Future()
        with self._lock:
            self._pending.append(future)
        self._group.send(_sample_message(mask))
        return future

    def check_alive(self) -> None:
        """Raises EngineDeadError when a rank has failed, or after a shutdown."""
        if self._group.failure is not None:
            raise self._group.failure
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down")

    def shutdown(self) -> None:
        """End all ranks. Calling twice is allowed."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._group.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._fail_pending(EngineDeadError("the engine was shut down"))

    def _await_ready(self, progress: Callable[[str, float], None] | None) -> None:
        while len(self._ready) < self._num_ranks:
            news = self._loading.get()
            if isinstance(news, HeadraceError):
                raise news
            rank, message = news
            if isinstance(message, RankReady):
                self._ready[rank] = message
            elif isinstance(message, RankProgress) and rank == 0 and progress is not None:
                progress(message.stage, message.share)

    def _on_message(self, rank: int, message: FromRank) -> None:
        if isinstance(message, RankOutput):
            with self._lock:
                future = self._pending.popleft()
            with contextlib.suppress(InvalidStateError):
                future.set_result(message.output)
        else:
            self._loading.put((rank, message))

    def _on_failure(self, error: HeadraceError) -> None:
        self._loading.put(error)
        self._fail_pending(error)

    def _fail_pending(self, error: HeadraceError) -> None:
        with self._lock:
            failed, self._pending = list(self._pending), deque()
        for future in failed:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)


def _sample_message(mask: TokenMask | None) -> Sample:
    if mask is None:
        return Sample()
    words = np.ascontiguousarray(mask.words, np.uint32)
    return Sample(words.tobytes(), mask.rows.tolist())
