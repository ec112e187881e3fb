"""What the benchmarks that profile steps share: their times between device events, and kernels by name."""

from __future__ import annotations

import collections
from typing import Any

import torch

from headrace.core.output import ModelRunnerOutput
from headrace.engine.engine_core import EngineCore

Totals = dict[str, list[float]]
"""Kernel name -> [microseconds, launches]."""


def timed_steps(core: EngineCore, count: int) -> float:
    """Mean milliseconds on the device of the steps that come in while ``count`` are run."""
    times: list[float] = []
    update = core.scheduler.update_from_output

    def recording(output: ModelRunnerOutput) -> Any:
        times.append(output.elapsed_ms)
        return update(output)

    core.scheduler.update_from_output = recording  # type: ignore[method-assign]
    for _ in range(count):
        core.step()
    core.scheduler.update_from_output = update  # type: ignore[method-assign]
    return sum(times) / len(times)


def profiled_steps(core: EngineCore, count: int) -> Totals:
    """Kernels of ``count`` steps on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            core.step()
        torch.cuda.synchronize()
    totals: Totals = collections.defaultdict(lambda: [0.0, 0.0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name][0] += event.device_time
            totals[event.name][1] += 1
    return totals


def print_kernels(totals: Totals, num_steps: int, most: int = 18) -> None:
    """The longest, a step."""
    for name, (time, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:most]:
        print(f"{time / num_steps:9.1f} us  {count / num_steps:6.1f} launches  {name[:90]}")
