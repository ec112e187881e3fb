"""StepMeter: what the steps of a run computed and how long device and host were at it."""

from __future__ import annotations

import time
from types import TracebackType

from headrace.core.cost_model import StepFeatures
from headrace.core.output import ModelRunnerOutput
from headrace.engine.engine_core import EngineCore


class StepMeter:
    """A context in which the steps of an engine core are counted as their results come in.

    Attributes:
        device_ms: of each step, between the events around it; gaps within a step count as the device's.
        wait_ms: of each step, how long the host stood still for it (or computed in the device's place).
        num_tokens, num_sampled, kv_tokens_read, attention_pairs: sums of ``StepFeatures``.
        kv_bytes_per_token: of one rank, over all KV groups.
        wall_s: from the context's begin to its end.
    """

    def __init__(self, core: EngineCore) -> None:
        self._scheduler = core.scheduler
        specs = core.executor.kv_cache_specs()
        self.kv_bytes_per_token = sum(spec.bytes_per_block for spec in specs) / core.scheduler.kv.block_size
        self.device_ms: list[float] = []
        self.wait_ms: list[float] = []
        self.num_tokens = self.num_sampled = self.kv_tokens_read = 0
        self.attention_pairs = 0.0
        self.wall_s = 0.0

    @property
    def idle_share(self) -> float:
        """Of the wall time in which the device computed no step."""
        return max(0.0, 1.0 - sum(self.device_ms) / 1e3 / self.wall_s)

    @property
    def host_ms_per_step(self) -> float:
        """Of the host's own work, waiting left out."""
        return max(0.0, 1e3 * self.wall_s - sum(self.wait_ms)) / max(len(self.device_ms), 1)

    def __enter__(self) -> StepMeter:
        self._watcher, self._scheduler.watcher = self._scheduler.watcher, self._count
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wall_s = time.perf_counter() - self._start
        self._scheduler.watcher = self._watcher

    def _count(self, features: StepFeatures, output: ModelRunnerOutput) -> None:
        self.device_ms.append(output.elapsed_ms)
        self.wait_ms.append(output.wait_ms)
        self.num_tokens += features.num_tokens
        self.num_sampled += features.num_sampled
        self.kv_tokens_read += features.kv_tokens_read
        self.attention_pairs += features.attention_pairs
