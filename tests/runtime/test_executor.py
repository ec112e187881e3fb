"""InProcessExecutor: order, overlap, death and shutdown."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import ModelRunnerOutput, SchedulerOutput
from headrace.errors import EngineDeadError
from headrace.runtime.executor import InProcessExecutor


class RecordedStep:
    """What the worker queued; fetching step 3 fails if asked for."""

    def __init__(self, step_id: int, fail_in: str) -> None:
        self._step_id, self._fail_in = step_id, fail_in

    def finish(self) -> ModelRunnerOutput:
        if self._fail_in == "finish" and self._step_id == 3:
            raise ValueError("boom")
        return ModelRunnerOutput(self._step_id)


class RecordingWorker:
    """Remembers its calls and their threads; step 3 fails in the phase asked for."""

    def __init__(self, fail_in: str = "", delay_s: float = 0.0) -> None:
        self.calls: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        self.num_shutdowns = 0
        self._fail_in = fail_in
        self._delay_s = delay_s
        self._step_id = 0

    loaded_memory_bytes = 11
    is_compiling = True

    @property
    def startup_s(self) -> dict[str, float]:
        return {"weights": 0.5}

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [KVCacheSpec("full", (0,), 64)]

    def num_kv_blocks(self) -> int:
        return 7

    def take_pages(self, lowest: int, highest: int) -> bool:
        return (lowest, highest) == (2, 5)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._step_id = scheduler_output.step_id
        self._note("execute")

    def sample_tokens(self, mask: Any | None) -> RecordedStep:
        self._note("sample")
        return RecordedStep(self._step_id, self._fail_in)

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def _note(self, call: str) -> None:
        self.calls.append((call, self._step_id))
        self.threads.add(threading.current_thread().name)
        time.sleep(self._delay_s)
        if call == self._fail_in and self._step_id == 3:
            raise ValueError("boom")


@pytest.mark.parametrize("outstanding", [1, 2, 4])
def test_steps_run_in_order_on_one_thread(outstanding: int) -> None:
    worker = RecordingWorker()
    executor = InProcessExecutor(worker, outstanding)
    assert executor.num_kv_blocks() == 7 and executor.kv_cache_specs()[0].kind == "full"
    assert executor.take_pages(2, 5) and not executor.take_pages(3, 5) and executor.is_compiling
    futures = []
    for step_id in range(1, 6):
        executor.execute_model(SchedulerOutput(step_id))
        futures.append(executor.sample_tokens(None))
    assert [future.result(5).step_id for future in futures] == [1, 2, 3, 4, 5]
    assert worker.calls == [(call, step) for step in range(1, 6) for call in ("execute", "sample")]
    assert len(worker.threads) == 1
    assert (threading.current_thread().name in worker.threads) == (outstanding == 1)
    executor.shutdown()


def test_the_caller_goes_on_while_a_step_runs() -> None:
    executor = InProcessExecutor(RecordingWorker(delay_s=0.05), 2)
    start_s = time.perf_counter()
    executor.execute_model(SchedulerOutput(1))
    future = executor.sample_tokens(None)
    assert time.perf_counter() - start_s < 0.04 and not future.done()
    assert future.result(5).step_id == 1 and time.perf_counter() - start_s >= 0.095
    executor.shutdown()


@pytest.mark.parametrize("outstanding", [1, 3])
@pytest.mark.parametrize("fail_in", ["execute", "sample"])
def test_a_failing_step_kills_the_engine(outstanding: int, fail_in: str) -> None:
    worker = RecordingWorker(fail_in)
    executor = InProcessExecutor(worker, outstanding)
    results: list[Future[Any]] = []
    for step_id in range(1, 5):
        try:
            results.append(executor.execute_model(SchedulerOutput(step_id)))
            results.append(executor.sample_tokens(None))
        except EngineDeadError as error:
            assert isinstance(error.__cause__, ValueError)
    failures = [future.exception(5) for future in results]
    num_good = 4 if fail_in == "execute" else 5
    assert failures[:num_good] == [None] * num_good
    assert failures[num_good:], "the failing call's own future carries the error"
    for failure in failures[num_good:]:
        assert isinstance(failure, EngineDeadError) and "ValueError: boom" in str(failure)
        assert isinstance(failure.__cause__, ValueError)
    assert max(step for _, step in worker.calls) == 3, "nothing runs after the failure"
    with pytest.raises(EngineDeadError, match="boom"):
        executor.execute_model(SchedulerOutput(9))
    executor.shutdown()


@pytest.mark.parametrize("outstanding", [1, 3])
def test_results_that_cannot_be_fetched_kill_the_engine(outstanding: int) -> None:
    executor = InProcessExecutor(RecordingWorker("finish"), outstanding)
    for step_id in range(1, 4):
        executor.execute_model(SchedulerOutput(step_id))
        future = executor.sample_tokens(None)
    with pytest.raises(EngineDeadError, match="boom"):
        future.result(5)
    with pytest.raises(EngineDeadError, match="boom"):
        executor.execute_model(SchedulerOutput(4))
    executor.shutdown()


def test_shutdown_finishes_what_is_queued_and_may_be_called_twice() -> None:
    worker = RecordingWorker(delay_s=0.02)
    executor = InProcessExecutor(worker, 2)
    executor.execute_model(SchedulerOutput(1))
    future = executor.sample_tokens(None)
    executor.shutdown()
    executor.shutdown()
    assert future.result(0).step_id == 1 and worker.num_shutdowns == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.execute_model(SchedulerOutput(2))
