"""InProcessExecutor: drives one worker in this process, so that scheduling and computing overlap."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from headrace.config import EngineConfig
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import ModelRunnerOutput, SchedulerOutput
from headrace.errors import EngineDeadError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StepWorker(Protocol):
    """What the executor drives; all calls come from one thread at a time, in step order."""

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The model's KV groups."""

    def num_kv_blocks(self) -> int:
        """Blocks that were allocated."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Run a step's forward."""

    def sample_tokens(self, mask: Any | None) -> ModelRunnerOutput:
        """Sample for it."""

    def shutdown(self) -> None:
        """Free the device."""


class InProcessExecutor:
    """Runs steps on the calling thread, or on one worker thread when several may be outstanding.

    Futures complete in step order. The first exception of a step kills the engine: its future and all later ones
    raise EngineDeadError with the exception as cause, and nothing more is executed.

    Args:
        worker: a loaded worker.
        max_steps_outstanding: 1 computes before the call returns; more computes beside the caller.
    """

    def __init__(self, worker: StepWorker, max_steps_outstanding: int = 1) -> None:
        self._worker = worker
        self._thread: ThreadPoolExecutor | None = None
        if max_steps_outstanding > 1:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-step")
        self._failure: BaseException | None = None
        self._is_shut_down = False
        self._forward_s = 0.0

    @classmethod
    def from_config(
        cls, config: EngineConfig, progress: Callable[[str, float], None] | None = None
    ) -> InProcessExecutor:
        """Load the model and reserve the KV memory.

        Args:
            progress: called with (stage, share done in [0, 1]) while loading.

        Raises: CheckpointError, ConfigError.
        """
        from headrace.runtime.worker import Worker

        worker = Worker(
            config.model, config.cache, config.scheduler, config.parallel, config.device, progress=progress
        )
        return cls(worker, config.scheduler.max_steps_outstanding)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The model's KV groups; all have the same ``bytes_per_block``."""
        return self._worker.kv_cache_specs()

    def num_kv_blocks(self) -> int:
        """Blocks that were allocated on the device."""
        return self._worker.num_kv_blocks()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Start the forward of one step. Raises EngineDeadError if an earlier step failed."""
        return self._submit(self._execute, scheduler_output)

    def sample_tokens(self, mask: Any | None) -> Future[ModelRunnerOutput]:
        """Sample for the step last executed. Raises EngineDeadError if an earlier step failed."""
        return self._submit(self._sample, mask)

    def shutdown(self) -> None:
        """Wait for the steps outstanding and free the device. Calling twice is allowed."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._worker.shutdown()

    def _submit(self, call: Callable[[Any], T], argument: Any) -> Future[T]:
        self._check_alive()
        if self._thread is not None:
            return self._thread.submit(self._run, call, argument)
        future: Future[T] = Future()
        try:
            future.set_result(self._run(call, argument))
        except EngineDeadError as error:
            future.set_exception(error)
        return future

    def _run(self, call: Callable[[Any], T], argument: Any) -> T:
        """``call(argument)``, unless the engine is dead; any exception kills it."""
        self._check_alive(is_queued=True)
        try:
            return call(argument)
        except Exception as error:
            logger.exception("a step failed; the engine stops")
            self._failure = error
            raise EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}") from error

    def _execute(self, scheduler_output: SchedulerOutput) -> None:
        start_s = time.perf_counter()
        self._worker.execute_model(scheduler_output)
        self._forward_s = time.perf_counter() - start_s

    def _sample(self, mask: Any | None) -> ModelRunnerOutput:
        start_s = time.perf_counter()
        output = self._worker.sample_tokens(mask)
        output.elapsed_ms = 1e3 * (self._forward_s + time.perf_counter() - start_s)
        return output

    def _check_alive(self, is_queued: bool = False) -> None:
        if self._failure is not None:
            cause = self._failure
            raise EngineDeadError(f"the engine stopped: {type(cause).__name__}: {cause}") from cause
        if self._is_shut_down and not is_queued:
            raise EngineDeadError("the engine was shut down")
