"""Drives an EngineCore over the fake executor and checks every answer against a plain oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from headrace.config import SchedulerConfig
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import EngineCoreOutput, EngineCoreRequest
from headrace.core.scheduler import Scheduler
from headrace.engine.engine_core import EngineCore
from headrace.runtime.fake_executor import FakeExecutor
from headrace.sampling_params import SamplingParams

VOCAB = 50
FULL = [KVCacheSpec("full", (0,), 64)]
HYBRID = [
    KVCacheSpec("sliding", (0, 1), 64, window=6),
    KVCacheSpec("sliding", (2, 3), 64, window=6),
    KVCacheSpec("full", (4, 5), 64),
]


def next_token(token_ids: list[int], child_index: int) -> int:
    """The made-up model: the last tokens and the length decide; children diverge."""
    value = len(token_ids) * 7919 + child_index * 104729
    for token in token_ids[-5:]:
        value = (value * 31 + token * 17 + 3) & 0xFFFFFFFF
    return (value >> 7) % VOCAB


def expected_answer(request: EngineCoreRequest, child_index: int) -> tuple[list[int], str]:
    """What a request must answer, whatever is scheduled beside it."""
    params, tokens = request.sampling_params, list(request.prompt_token_ids)
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(request.eos_token_ids))
    for count in range(1, request.max_tokens + 1):
        tokens.append(next_token(tokens, child_index))
        if tokens[-1] in stops and count > params.min_tokens:
            return tokens[len(request.prompt_token_ids) :], "stop"
    return tokens[len(request.prompt_token_ids) :], "length"


@dataclasses.dataclass
class Answer:
    """What came back for one child."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    message: str | None = None
    num_cached_tokens: int = 0
    timeline: Any = None


class CoreHarness:
    """An engine core over a small KV cache; collects answers, checks integrity after each step."""

    def __init__(
        self,
        specs: list[KVCacheSpec] = FULL,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        lag: int = 0,
        check: bool = True,
        prefix_caching: bool = True,
        executor: Callable[..., Any] = FakeExecutor,
        executor_options: dict[str, Any] | None = None,
        tier: Any = None,
        mask_source: Any = None,
        **scheduler_options: Any,
    ) -> None:
        options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **scheduler_options}
        self.kv = KVCacheManager(
            specs, num_blocks, block_size, enable_prefix_caching=prefix_caching, min_copy_tokens=2, tier=tier
        )
        self.executor = executor(
            specs,
            num_blocks,
            block_size,
            vocab_size=VOCAB,
            lag=lag,
            **{"next_token": next_token, **(executor_options or {})},
        )
        scheduler = Scheduler(SchedulerConfig(**options), self.kv, tier=tier)
        self.core = EngineCore(scheduler, self.executor, mask_source=mask_source, seed=0)
        self.requests: dict[str, EngineCoreRequest] = {}
        self.answers: dict[tuple[str, int], Answer] = {}
        self._check = check

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int = 8, **options: Any
    ) -> EngineCoreRequest:
        """Submit a request; ``options`` are of EngineCoreRequest or of SamplingParams."""
        own = {f for f in EngineCoreRequest.__struct_fields__ if f in options}
        params = SamplingParams(max_tokens=max_tokens, **{k: v for k, v in options.items() if k not in own})
        request = EngineCoreRequest(request_id, prompt, params, max_tokens, **{k: options[k] for k in own})
        self.core.add_request(request)
        self.requests[request_id] = request
        for child in range(params.n):
            self.answers[(request_id, child)] = Answer()
        return request

    def step(self) -> list[EngineCoreOutput]:
        """One engine step."""
        news = self.core.step()
        for item in news:
            answer = self.answers[(item.request_id, item.child_index)]
            assert answer.finish_reason is None, f"{item.request_id} got news after its end"
            answer.token_ids += item.new_token_ids
            if item.finish_reason is not None:
                answer.finish_reason, answer.message = item.finish_reason, item.message
                answer.num_cached_tokens, answer.timeline = item.num_cached_tokens, item.timeline
        if self._check:
            self.core.scheduler.check_integrity()
        return news

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left, then check that no block is held."""
        for _ in range(max_steps):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work(), "the engine did not come to rest"
        self.assert_nothing_held()

    def assert_nothing_held(self) -> None:
        """All blocks are free or merely cached."""
        self.core.scheduler.check_integrity()
        stats = self.core.stats()
        assert stats.num_held_blocks == 0 and stats.num_fenced_blocks == 0
        assert self.kv.num_usable_blocks == self.kv.num_blocks

    def check_answers(self) -> None:
        """Every finished answer is the oracle's; an aborted one is a prefix of it."""
        for (request_id, child), answer in self.answers.items():
            expected, reason = expected_answer(self.requests[request_id], child)
            if answer.finish_reason == "abort":
                assert answer.token_ids == expected[: len(answer.token_ids)], request_id
            else:
                assert (answer.token_ids, answer.finish_reason) == (expected, reason), request_id
