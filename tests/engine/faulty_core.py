"""Engine cores that fail on purpose; factories for ``CoreSpec``."""

from __future__ import annotations

import os
import signal
import time

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreOutput, EngineCoreRequest
from headrace.engine.null_core import NullCore
from headrace.errors import CheckpointError


def cannot_load(config: EngineConfig, progress: object = None) -> NullCore:
    raise CheckpointError(f"{config.model.model}: the file is cut after 12 bytes")


class CrashingCore(NullCore):
    """Fails in the step after ``steps`` steps: by an exception, or by a signal to itself."""

    def __init__(self, config: EngineConfig, steps: int, by_signal: bool) -> None:
        super().__init__(config, [5, 6, 7])
        self.steps_left = steps
        self.by_signal = by_signal

    def step(self) -> list[EngineCoreOutput]:
        if self.steps_left == 0:
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("a step failed")
        self.steps_left -= 1
        return super().step()


def crashes(
    config: EngineConfig, steps: int = 2, by_signal: bool = False, progress: object = None
) -> CrashingCore:
    return CrashingCore(config, steps, by_signal)


class RefusingCore(NullCore):
    """Refuses the request called "bad" with an error of no known class."""

    def add_request(self, request: EngineCoreRequest) -> None:
        if request.request_id == "bad":
            raise RuntimeError("not a request error")
        super().add_request(request)


def refuses(config: EngineConfig, progress: object = None) -> RefusingCore:
    return RefusingCore(config, [5])


class SlowPrompts(NullCore):
    """Runs what it is given, and never has a token."""

    def step(self) -> list[EngineCoreOutput]:
        news = super().step()
        time.sleep(0.005)
        return [item for item in news if item.finish_reason == "abort"]


def slow_prompts(config: EngineConfig, progress: object = None) -> SlowPrompts:
    return SlowPrompts(config, [5])
