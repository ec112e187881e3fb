"""Engine cores with odd habits; factories for ``CoreSpec``."""

from __future__ import annotations

import time
from typing import Any

from headrace.config import EngineConfig
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import EngineCoreOutput, EngineCoreRequest, ErrorKind
from headrace.engine.assemble import assemble
from headrace.engine.engine_core import EngineCore
from headrace.engine.front_end import FrontEnd
from headrace.engine.null_core import NullCore
from headrace.runtime.fake_executor import FakeExecutor
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


class RefusesLate(NullCore):
    """Finds in the fifth step of an answer that its request was wrong."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, TOKENS, step_s=0.02)

    def step(self) -> list[EngineCoreOutput]:
        done = {key: sequence.num_done for key, sequence in self._running.items()}
        outputs = super().step()
        for output in outputs:
            if done.get((output.request_id, output.child_index)) == 4:
                self.abort_requests([output.request_id])
                output.finish_reason, output.message = "error", "no token is allowed here"
                output.refusal = ErrorKind("GrammarError", "bad_words", "no_token_allowed")
                output.new_token_ids = []
        return outputs


def refuses_late(config: EngineConfig, progress: object = None) -> RefusesLate:
    return RefusesLate(config)


class Parrot(NullCore):
    """Answers with the text that follows SAY: in the prompt's last message, one of the tokenizer's tokens a step."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, TOKENS, step_s=0.002)  # slow enough that streams have several parts
        tokenizer = FrontEnd.open(config.model).tokenizer
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.answers: dict[str, list[int]] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(request)
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        text = prompt.rpartition("SAY:")[2].partition("<|im_end|>")[0]
        self.answers[request.request_id] = self.tokenizer.encode(text, add_special_tokens=False)

    def _advance(self, sequence: Any, now: float) -> EngineCoreOutput:
        output = super()._advance(sequence, now)
        if sequence.num_done == len(self.answers[output.request_id]) + 1:
            output.finish_reason = "stop"
            sequence.timeline.stamp("FINISHED", now, "stop")
            output.timeline = sequence.timeline
        return output

    def _token(self, request: EngineCoreRequest, position: int) -> int:
        answer = self.answers[request.request_id]
        eos = self.tokenizer.eos_token_id
        assert eos is not None
        return answer[position] if position < len(answer) else eos


def parrot(config: EngineConfig, progress: object = None) -> Parrot:
    return Parrot(config)


def masked(
    config: EngineConfig, progress: object = None, num_blocks: int = 4000, **options: Any
) -> EngineCore:
    """A real engine core with real grammars over a made-up model: an answer is some text that its constraint allows.

    Args:
        num_blocks: of 16 tokens each.
        options: of the FakeExecutor.
    """
    executor = FakeExecutor(
        [KVCacheSpec("full", (0,), 64)], num_blocks, 16, vocab_size=49152, verify=False, **options
    )
    return assemble(config, executor)
