"""InProcessExecutor: drives one worker in this process, so that scheduling and computing overlap."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headrace.config import EngineConfig
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import ModelRunnerOutput, SchedulerOutput
from headrace.core.token_mask import TokenMask
from headrace.errors import EngineDeadError

if TYPE_CHECKING:
    from headrace.kv_transfer.host_memory import HostMemory

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PendingStep(Protocol):
    """A step whose work is queued on the device."""

    def finish(self) -> ModelRunnerOutput:
        """Wait for the device and fetch the results."""


class StepWorker(Protocol):
    """What the executor drives; all calls come from one thread at a time, in step order."""

    @property
    def loaded_memory_bytes(self) -> int:
        """What it held on its device when it was loaded."""

    @property
    def startup_s(self) -> dict[str, float]:
        """Seconds of each stage of its start."""

    @property
    def is_compiling(self) -> bool:
        """Whether kernels are being compiled ahead."""

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The model's KV groups."""

    def num_kv_blocks(self) -> int:
        """Blocks that were allocated."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Run a step's forward."""

    def sample_tokens(self, mask: TokenMask | None) -> PendingStep:
        """Queue the sampling of it on the device."""

    def take_pages(self, lowest: int, highest: int) -> bool:
        """Have memory of blocks early. False: there is no more to have."""

    def open_host_memory(self, num_bytes: int, dtype: str = "auto") -> HostMemory:
        """Host memory for KV blocks, in the form of ``tier_cache_dtype``."""

    def cache_fingerprint(self, dtype: str = "auto") -> bytes:
        """What the bytes of a KV block depend on."""

    def check_weights(self, model: str | None) -> None:
        """Whether these weights can replace the running ones. Raises CheckpointError, ConfigError."""

    def update_weights(self, model: str | None) -> None:
        """Replace the weights. Raises EngineDeadError when the old ones are gone, another HeadraceError when not."""

    def shutdown(self) -> None:
        """Free the device."""


class InProcessExecutor:
    """Runs steps on the calling thread, or on one worker thread when several may be outstanding and the device would
    hold the caller up.

    Futures complete in step order. The first exception of a step kills the engine: its future and all later ones
    raise EngineDeadError with the exception as cause, and nothing more is executed.

    Args:
        worker: a loaded worker.
        max_steps_outstanding: 1 computes before the call returns; more computes beside the caller.
        is_asynchronous: the worker only queues work on a device of its own: no thread is needed to go on meanwhile.
    """

    def __init__(
        self, worker: StepWorker, max_steps_outstanding: int = 1, is_asynchronous: bool = False
    ) -> None:
        self._worker = worker
        self._waits = max_steps_outstanding == 1
        self._thread: ThreadPoolExecutor | None = None
        if max_steps_outstanding > 1 and not is_asynchronous:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-step")
        self._failure: BaseException | None = None
        self._is_shut_down = False

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
        return cls(worker, config.scheduler.steps_outstanding, worker.is_asynchronous)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The model's KV groups; all have the same ``bytes_per_block``."""
        return self._worker.kv_cache_specs()

    def num_kv_blocks(self) -> int:
        """Blocks that were allocated on the device."""
        return self._worker.num_kv_blocks()

    def open_host_memory(self, num_bytes: int, dtype: str = "auto") -> HostMemory:
        """Host memory that KV blocks can be copied to and from, beside steps. Raises ConfigError."""
        return self._worker.open_host_memory(num_bytes, dtype)

    def cache_fingerprint(self, dtype: str = "auto") -> bytes:
        """16 bytes that tell apart what the bytes of a KV block mean in tiers of ``tier_cache_dtype``."""
        return self._worker.cache_fingerprint(dtype)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Start the forward of one step. Raises EngineDeadError if an earlier step failed."""
        return self._submit(self._worker.execute_model, scheduler_output)

    def sample_tokens(self, mask: TokenMask | None) -> Future[ModelRunnerOutput]:
        """Sample for the step last executed. Raises EngineDeadError if an earlier step failed."""
        launched = self._submit(self._worker.sample_tokens, mask)
        future = _ResultFuture(launched, self._guarded)
        if self._waits:
            future.exception()
        return future

    def update_weights(self, model: str | None) -> None:
        """Replace the weights; no step may be outstanding. See ``Executor``."""
        self._check_alive()
        if self._thread is None:
            self._update_weights(model)
        else:
            self._thread.submit(self._update_weights, model).result()

    def _update_weights(self, model: str | None) -> None:
        try:
            self._worker.check_weights(model)
            self._worker.update_weights(model)
        except EngineDeadError as error:
            self._failure = error
            raise

    @property
    def is_compiling(self) -> bool:
        """Whether a call may wait for a kernel; see ``Executor``."""
        return self._worker.is_compiling

    def take_pages(self, lowest: int, highest: int) -> bool:
        """Have memory of the next blocks early; see ``Executor``."""
        return self._worker.take_pages(lowest, highest)

    def rank_memory_bytes(self) -> list[int]:
        """What the one rank held on its device when it was loaded."""
        return [self._worker.loaded_memory_bytes]

    def startup_s(self) -> dict[str, float]:
        """Seconds of each stage of the start."""
        return self._worker.startup_s

    def check_alive(self) -> None:
        """Raises EngineDeadError when a step has failed, or after a shutdown."""
        self._check_alive()

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
        try:
            result = self._run(call, argument)
        except EngineDeadError as error:
            future: Future[T] = Future()
            future.set_exception(error)
            return future
        return _done(result)

    def _run(self, call: Callable[[Any], T], argument: Any) -> T:
        """``call(argument)``, unless the engine is dead."""
        self._check_alive(is_queued=True)
        return self._guarded(lambda: call(argument))

    def _guarded(self, call: Callable[[], T]) -> T:
        """``call()``; any exception of it kills the engine."""
        try:
            return call()
        except EngineDeadError:
            raise
        except Exception as error:
            logger.exception("a step failed; the engine stops")
            self._failure = error
            raise EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}") from error

    def _check_alive(self, is_queued: bool = False) -> None:
        if self._failure is not None:
            cause = self._failure
            raise EngineDeadError(f"the engine stopped: {type(cause).__name__}: {cause}") from cause
        if self._is_shut_down and not is_queued:
            raise EngineDeadError("the engine was shut down")


def _done(result: T) -> Future[T]:
    """A future of what is there; those of None are one object, since each step asks for one."""
    if result is None:
        return _DONE
    future: Future[T] = Future()
    future.set_result(result)
    return future


_DONE: Future[Any] = Future()
_DONE.set_result(None)


class _ResultFuture(Future[ModelRunnerOutput]):
    """Results that are fetched from the device by whoever asks for them, so that the thread that feeds the device
    never waits for it."""

    def __init__(
        self,
        launched: Future[PendingStep],
        guarded: Callable[[Callable[[], ModelRunnerOutput]], ModelRunnerOutput],
    ) -> None:
        super().__init__()
        self._launched = launched
        self._guarded = guarded

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the step and fetch its results. Raises EngineDeadError if it failed."""
        if not self.done():
            try:
                self.set_result(self._guarded(self._launched.result(timeout).finish))
            except EngineDeadError as error:
                self.set_exception(error)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the step; its failure or None."""
        try:
            self.result(timeout)
        except EngineDeadError as error:
            return error
        return None
