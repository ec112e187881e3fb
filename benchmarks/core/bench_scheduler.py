"""Host cost of the control plane, without a device.

    python benchmarks/core/bench_scheduler.py

Prints (1) microseconds of ``schedule`` and ``update_from_output`` a step at 256 running requests of 1k tokens in steady
decode, with the share of the radix tree; (2) wall time over device time with a pretended device of 5 ms a step, at
D = 1 and 2.
"""

from __future__ import annotations

import argparse
import statistics
import time

from headrace.config import SchedulerConfig
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from headrace.core.scheduler import Scheduler
from headrace.engine.engine_core import EngineCore
from headrace.runtime.fake_executor import FakeExecutor
from headrace.sampling_params import SamplingParams

SPECS = [KVCacheSpec("full", (0,), 1)]


def make_core(num_requests: int, executor: FakeExecutor, num_blocks: int, outstanding: int) -> EngineCore:
    config = SchedulerConfig(
        max_num_seqs=num_requests, max_num_batched_tokens=8192, max_steps_outstanding=outstanding
    )
    return EngineCore(Scheduler(config, KVCacheManager(SPECS, num_blocks, 16)), executor, seed=0)


def submit(core: EngineCore, num_requests: int, prompt: int, output: int) -> None:
    for number in range(num_requests):
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0)
        ids = [(number * 7919 + i * 104729) % 50000 for i in range(prompt)]
        core.add_request(EngineCoreRequest(f"r{number}", ids, params, output))


def results_of(output: SchedulerOutput) -> ModelRunnerOutput:
    ids = [output.request_ids[i] for i in output.sampled]
    return ModelRunnerOutput(output.step_id, ids, [[7] for _ in ids], elapsed_ms=5.0)


def bench_host(num_requests: int, prompt: int, steps: int) -> None:
    num_blocks = num_requests * (prompt + steps + 64) // 16 + num_requests
    executor = FakeExecutor(SPECS, num_blocks, 16, verify=False)
    core = make_core(num_requests, executor, num_blocks, 1)
    submit(core, num_requests, prompt, steps + 64)
    scheduler = core.scheduler
    running = scheduler.lifecycle.running
    while len(running) < num_requests or any(r.num_output_tokens == 0 for r in running):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update_from_output(results_of(output))
    times, parts = [], []
    for _ in range(steps):
        start = time.perf_counter()
        output = scheduler.schedule()
        middle = time.perf_counter()
        assert output is not None and len(output.request_ids) == num_requests
        result = results_of(output)
        before = time.perf_counter()
        scheduler.update_from_output(result)
        end = time.perf_counter()
        times.append((middle - start) + (end - before))
        parts.append((middle - start, end - before))
    micros = [1e6 * t for t in times]
    schedule = statistics.median(1e6 * a for a, _ in parts)
    update = statistics.median(1e6 * b for _, b in parts)
    print(
        f"steady decode, {num_requests} requests x {prompt} tokens: median {statistics.median(micros):.0f} us a step "
        f"(schedule {schedule:.0f}, update {update:.0f}), mean {statistics.mean(micros):.0f}, max {max(micros):.0f}"
    )


def bench_overlap(num_requests: int, prompt: int, output: int, step_ms: float) -> None:
    for outstanding in (1, 2):
        num_blocks = num_requests * (prompt + output + 32) // 16
        executor = FakeExecutor(SPECS, num_blocks, 16, step_ms=step_ms, verify=False)
        core = make_core(num_requests, executor, num_blocks, outstanding)
        submit(core, num_requests, prompt, output)
        start = time.perf_counter()
        while core.has_work():
            core.step()
        wall = time.perf_counter() - start
        print(
            f"device of {step_ms:g} ms a step, {num_requests} requests, D = {outstanding}: wall {wall:.3f} s, "
            f"device {executor.device_busy_s:.3f} s, ratio {wall / executor.device_busy_s:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    bench_host(args.requests, args.prompt, args.steps)
    bench_overlap(args.requests, 64, 1000, 5.0)


if __name__ == "__main__":
    main()
