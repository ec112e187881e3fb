"""Engine cores with odd habits; factories for ``CoreSpec``."""

from __future__ import annotations

import time

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreOutput
from headrace.engine.null_core import NullCore
from tests.serve.null_server import TOKENS


def loads_slowly(config: EngineConfig, load_s: float, progress: object = None) -> NullCore:
    time.sleep(load_s)
    return NullCore(config, TOKENS)


class FailsOne(NullCore):
    """Ends answers to prompts of one length with an error in their second step."""

    def __init__(self, config: EngineConfig, prompt_length: int) -> None:
        super().__init__(config, TOKENS, step_s=0.001)
        self.prompt_length = prompt_length
        self.seen: dict[str, int] = {}

    def step(self) -> list[EngineCoreOutput]:
        lengths = {
            key[0]: len(s.request.prompt_token_ids) for key, s in (self._waiting | self._running).items()
        }
        outputs = super().step()
        for output in outputs:
            if lengths.get(output.request_id) == self.prompt_length:
                self.abort_requests([output.request_id])
                output.finish_reason, output.message = "error", "the logits are not finite"
                output.new_token_ids = []
        return outputs


def fails_one(config: EngineConfig, prompt_length: int, progress: object = None) -> FailsOne:
    return FailsOne(config, prompt_length)
