"""A model that says what its prompt asks for, with probabilities that depend on the tokens alone."""

from __future__ import annotations

import zlib
from typing import Any

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.thread_client import ThreadClient
from headrace.lang.backend import Backend
from headrace.lang.local import LocalBackend
from tests.serve.odd_cores import Parrot


class Oracle(Parrot):
    """Says what stands between the prompt's last SAY: and the next line end, then stops.

    A token's log-probability is -6 to 0 by its predecessor and itself; a token that holds "good" has -0.01.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.prompts: list[str] = []
        self.most_at_once = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(request)
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        text = prompt.rpartition("SAY:")[2].partition("\n")[0].partition("<|im_end|>")[0]
        self.answers[request.request_id] = self.tokenizer.encode(text, add_special_tokens=False)

    def step(self) -> list[EngineCoreOutput]:
        self.most_at_once = max(self.most_at_once, len(self._waiting) + len(self._running))
        return super().step()

    def _advance(self, sequence: Any, now: float) -> EngineCoreOutput:
        output = super()._advance(sequence, now)
        ids = sequence.request.prompt_token_ids
        if output.prompt_logprobs is not None:
            start = len(ids) - len(output.prompt_logprobs)
            output.prompt_logprobs = [
                TokenLogprobs([ids[i]], [self.logprob(ids[i - 1], ids[i])], 1) for i in range(start, len(ids))
            ]
        return output

    def logprob(self, before: int, token: int) -> float:
        if "good" in self.tokenizer.token_text(token):
            return -0.01
        return -(zlib.crc32(f"{before} {token}".encode()) % 6000) / 1000


def oracle(config: EngineConfig, progress: object = None, made: list[Oracle] | None = None) -> Oracle:
    core = Oracle(config)
    if made is not None:
        made.append(core)
    return core


class LocalOracle:
    """A backend over an oracle in a thread of this process."""

    def __init__(self) -> None:
        config = EngineConfig.from_options(model="smollm2")
        self._made: list[Oracle] = []
        spec = CoreSpec("tests.lang.oracle:oracle", config, {"made": self._made})
        self.backend: Backend = LocalBackend(lambda: AsyncLLM(config, ThreadClient(spec)))

    @property
    def core(self) -> Oracle:
        """The oracle, once a program has run."""
        return self._made[0]
