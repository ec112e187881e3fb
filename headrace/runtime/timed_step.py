"""TimedStep: a step that the device was given, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headrace.core.output import ModelRunnerOutput
from headrace.platforms.base import DeviceEvent
from headrace.runtime.model_runner import PendingOutput


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step queued on the device, between two events.

    on_tokens: told of the sampled tokens [S] as soon as they are on the host.
    """

    pending: PendingOutput
    started: DeviceEvent
    ended: DeviceEvent
    is_asynchronous: bool = False
    on_tokens: Callable[[Tensor], None] | None = None

    def finish(self) -> ModelRunnerOutput:
        """Wait for the step's end; its results, with the time that the device took."""
        start = time.perf_counter()
        self.ended.wait()
        waited_ms = 1e3 * (time.perf_counter() - start)
        sampled = self.pending.sampled
        if self.on_tokens is not None and sampled is not None:
            self.on_tokens(sampled.token_ids)
        output = self.pending.finish()
        output.elapsed_ms = self.started.elapsed_ms(self.ended)
        output.wait_ms = waited_ms if self.is_asynchronous else output.elapsed_ms
        return output
