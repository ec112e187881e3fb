"""TimedStep: a step that the device was given, and how long it took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from headrace.core.output import ModelRunnerOutput
from headrace.platforms.base import DeviceEvent
from headrace.runtime.model_runner import PendingOutput


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step queued on the device, between two events."""

    pending: PendingOutput
    started: DeviceEvent
    ended: DeviceEvent
    is_asynchronous: bool = False

    def finish(self) -> ModelRunnerOutput:
        """Wait for the step's end; its results, with the time that the device took."""
        start = time.perf_counter()
        self.ended.wait()
        waited_ms = 1e3 * (time.perf_counter() - start)
        output = self.pending.finish()
        output.elapsed_ms = self.started.elapsed_ms(self.ended)
        output.wait_ms = waited_ms if self.is_asynchronous else output.elapsed_ms
        return output
