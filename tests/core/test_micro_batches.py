"""A pipeline's steps: each takes a part of the running streams, and they take turns."""

from __future__ import annotations

import random

import pytest

from headrace.config import SchedulerConfig
from headrace.core.scheduler import Scheduler
from headrace.engine.engine_core import EngineCore
from tests.engine.core_harness import FULL, HYBRID, CoreHarness


class PipelineHarness(CoreHarness):
    """A core over a scheduler with micro-batches, whose executor answers late."""

    def __init__(self, num_stages: int, specs=FULL, num_blocks: int = 64, **options) -> None:
        depth = 2 * num_stages
        super().__init__(specs, num_blocks, lag=depth, max_steps_outstanding=depth, **options)
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_steps_outstanding=depth)
        scheduler = Scheduler(config, self.kv, num_micro_batches=num_stages)
        self.core = EngineCore(scheduler, self.executor, seed=0)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_streams_are_shared_out_and_take_turns(num_stages: int) -> None:
    harness = PipelineHarness(num_stages)
    for number in range(8):
        harness.add(f"r{number}", [number + 1, number + 2], max_tokens=30)
    sizes: list[int] = []
    num_full = 0
    scheduler = harness.core.scheduler
    while harness.core.has_work():
        harness.step()
        decoding = [step for step in scheduler.in_flight if step.num_decodes == len(step.requests)]
        sizes += [len(step.requests) for step in decoding]
        recent = [request for step in list(decoding)[-num_stages:] for request in step.requests]
        if len(decoding) == len(scheduler.in_flight) >= num_stages and len(scheduler.lifecycle.running) == 8:
            assert len(recent) == len(set(map(id, recent))) == 8, "all have had their turn"
            num_full += 1
        assert all(request.num_placeholders <= 2 for request in scheduler.lifecycle.running)
    harness.assert_nothing_held()
    harness.check_answers()
    assert max(sizes) <= -(-8 // num_stages) and len(sizes) > 30 and num_full > 10


def test_a_stream_that_is_alone_runs_ahead_by_one_step() -> None:
    harness = PipelineHarness(2)
    harness.add("alone", [1, 2, 3], max_tokens=30)
    depths = []
    while harness.core.has_work():
        harness.step()
        depths.append(len(harness.core.scheduler.in_flight))
    harness.check_answers()
    assert depths.count(1) > 20, "one step is left in flight when another's results come"


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    harness = PipelineHarness(3)
    harness.add("long", list(range(1, 49)) * 3, max_tokens=4)
    harness.step()
    assert [step.num_tokens for step in harness.core.scheduler.in_flight] == [32, 32, 32, 16, 1]
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize("seed", range(6))
def test_random_work_under_memory_pressure(seed: int) -> None:
    rng = random.Random(seed)
    harness = PipelineHarness(rng.choice([2, 3]), rng.choice([FULL, HYBRID]), rng.choice([40, 90]))
    for number in range(25):
        prompt = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 40))]
        harness.add(f"r{number}", prompt, max_tokens=rng.randrange(1, 20), n=rng.choice([1, 1, 3]))
        for _ in range(rng.randrange(4)):
            harness.step()
        if rng.random() < 0.15:
            harness.core.abort_requests([f"r{rng.randrange(number + 1)}"])
    harness.run()
    harness.check_answers()
