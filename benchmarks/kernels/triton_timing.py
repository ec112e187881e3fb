"""Timing of CUDA launches in graphs, and compiling of Triton kernels without a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.runtime.jit as jit
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

MEMORY_BYTES_PER_S = 4.3e12
FLOPS_PER_S = 788e12
"""What an H200 was measured to reach: a device-to-device copy (read + written), a bf16 matrix product."""

Launch = Callable[[], object]


@dataclass
class Work:
    """What a case measures.

    launches: run in turn, on different memory, so that nothing is found in the L2 that a model would not find there.
    check: relative error of the last launch, after all have run once; None: not checked here.
    """

    launches: Sequence[Launch]
    check: Callable[[], float] | None = None


@dataclass
class Case:
    """One kernel, shape and variant.

    make: the work on a device ("meta" to compile only).
    bytes, flops: that a launch cannot do without.
    max_error: of ``Work.check``.
    """

    group: str
    name: str
    variant: str
    make: Callable[[torch.device], Work]
    bytes: float
    flops: float = 0.0
    max_error: float = 1e-2
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def limit_us(self) -> float:
        """By bandwidth or by arithmetic, whichever is more."""
        return 1e6 * max(self.bytes / MEMORY_BYTES_PER_S, self.flops / FLOPS_PER_S)


def graph_us(launches: Sequence[Launch], seconds: float = 0.03, samples: int = 5) -> float:
    """Microseconds of a launch within a CUDA graph of all of them (at least 16): the median of samples."""
    return statistics.median(graphs_us([launches], seconds, samples)[0])


def graphs_us(ways: Sequence[Sequence[Launch]], seconds: float = 0.03, samples: int = 5) -> list[list[float]]:
    """For each way to do the same, microseconds of a launch in each sample; the ways take turns, so that samples of
    one index compare. ``seconds`` is what each way may take."""
    stream, graphs, counts = torch.cuda.Stream(), [], []
    for launches in ways:
        repeats = max(1, -(-16 // len(launches)))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in launches:
                launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for launch in launches:
                    launch()
        graphs.append(graph)
        counts.append(repeats * len(launches))
    replays = [
        max(1, int(seconds / samples / max(event_ms(graph.replay, 2) / 1e3, 1e-6))) for graph in graphs
    ]
    found: list[list[float]] = [[] for _ in graphs]
    for _ in range(samples):
        for place, graph in enumerate(graphs):
            found[place].append(1e3 * event_ms(graph.replay, replays[place]) / counts[place])
    return found


def event_ms(action: Callable[[], object], count: int) -> float:
    """Milliseconds of an action on the device, averaged over ``count`` in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


class _Driver:
    """Stands in for the GPU's driver while compiling without one."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)
        self.utils = self

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {"multiprocessor_count": 132, "max_shared_mem": 232448}

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_only(arch: int = 90):
    """Within it launches compile their kernels into Triton's cache on disk and do not run; yields the kernels."""
    compiled: list[tuple[str, Any]] = []
    original = jit.JITFunction.run

    def run(self, *args, grid=None, warmup=False, **kwargs):
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self._fn_name, kernel))
        return kernel

    driver.set_active(_Driver(arch))
    jit.JITFunction.run = run
    try:
        yield compiled
    finally:
        jit.JITFunction.run = original
        driver._active = None
