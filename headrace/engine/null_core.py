"""NullCore: an engine core without a model. It measures the front end, and stands in for the engine in its tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from headrace.core.timeline import Timeline
from headrace.errors import CapacityError, GrammarError


class _Sequence:
    """One answer in progress: request, child, tokens given so far, stamps."""

    __slots__ = ("child_index", "num_done", "request", "timeline")

    def __init__(self, request: EngineCoreRequest, child_index: int, now: float) -> None:
        self.request = request
        self.child_index = child_index
        self.num_done = 0
        self.timeline = Timeline()
        self.timeline.stamp("QUEUED", now)


class NullCore:
    """Answers each request with tokens that depend on its prompt alone, one per step, as fast as it is driven.

    tokens: the answer's tokens are taken from here in a cycle that starts at the prompt's length.
    step_s: time a step takes.
    """

    def __init__(self, config: EngineConfig, tokens: list[int], step_s: float = 0.0) -> None:
        self._tokens = tokens
        self.stream_interval = config.scheduler.stream_interval or 1
        self._step_s = step_s
        self._max_running = config.scheduler.max_seats
        self._max_waiting = config.scheduler.max_waiting_requests
        self._waiting: dict[tuple[str, int], _Sequence] = {}
        self._running: dict[tuple[str, int], _Sequence] = {}
        self._pending: list[EngineCoreOutput] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue all answers. Raises CapacityError when the queue is full, GrammarError for a constraint."""
        if request.constraint is not None:
            raise GrammarError("this engine has no grammars: leave it out", param="structured_outputs")
        if len(self._waiting) >= self._max_waiting:
            raise CapacityError(
                f"{len(self._waiting)} requests wait already; at most {self._max_waiting} may: try again later",
                code="queue_full",
            )
        now = time.monotonic()
        for child in range(request.sampling_params.num_told_answers):
            self._waiting[request.request_id, child] = _Sequence(request, child, now)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Forget requests."""
        gone = set(request_ids)
        for queue in (self._waiting, self._running):
            for key in [key for key in queue if key[0] in gone]:
                del queue[key]

    def abort_child(self, request_id: str, child_index: int) -> None:
        """Forget one answer; like a real core, confirm it with a last output."""
        sequence = self._running.pop((request_id, child_index), None)
        sequence = sequence or self._waiting.pop((request_id, child_index), None)
        if sequence is not None:
            sequence.timeline.stamp("FINISHED", time.monotonic(), "abort")
            self._pending.append(
                EngineCoreOutput(request_id, child_index, finish_reason="abort", timeline=sequence.timeline)
            )

    def call_cache(self, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """There is no cache: what is asked comes back."""
        return {"action": action, **arguments}

    def update_weights(self, model: str | None) -> None:
        """There are none."""

    def step(self) -> list[EngineCoreOutput]:
        """One token for every running answer."""
        if self._step_s:
            time.sleep(self._step_s)
        now = time.monotonic()
        while self._waiting and len(self._running) < self._max_running:
            key = next(iter(self._waiting))
            sequence = self._running[key] = self._waiting.pop(key)
            sequence.timeline.stamp("RUNNING", now)
        outputs, self._pending = self._pending, []
        outputs += [self._advance(sequence, now) for sequence in self._running.values()]
        for output in outputs:
            if output.finish_reason in ("length", "stop"):
                del self._running[output.request_id, output.child_index]
        return outputs

    def _advance(self, sequence: _Sequence, now: float) -> EngineCoreOutput:
        request, params = sequence.request, sequence.request.sampling_params
        token = self._token(request, sequence.num_done + sequence.child_index)
        is_first = sequence.num_done == 0
        sequence.num_done += 1
        sequence.timeline.token_times.append(now)
        output = EngineCoreOutput(request.request_id, sequence.child_index, [token])
        if params.logprobs is not None:
            output.logprobs = [TokenLogprobs([token], [-0.5], 1)]
        if params.prompt_logprobs is not None and is_first:
            start = max(params.logprobs_from, 1)
            output.prompt_logprobs = [TokenLogprobs([t], [-1.0], 1) for t in request.prompt_token_ids[start:]]
        if sequence.num_done >= request.max_tokens:
            output.finish_reason = "length"
        elif token in (params.stop_token_ids or ()):
            output.finish_reason, output.stop_reason = "stop", token
        if output.finish_reason:
            sequence.timeline.stamp("FINISHED", now, output.finish_reason)
            output.timeline = sequence.timeline
        return output

    def _token(self, request: EngineCoreRequest, position: int) -> int:
        return self._tokens[(len(request.prompt_token_ids) + position) % len(self._tokens)]

    def use_idle_time(self) -> bool:
        """There is nothing to do."""
        return False

    def has_work(self) -> bool:
        """True while any answer is unfinished."""
        return bool(self._waiting or self._running or self._pending)

    def stats(self) -> dict[str, Any]:
        """Gauges, under the engine core's names."""
        return {"num_running": len(self._running), "num_waiting": len(self._waiting)}

    def shutdown(self) -> None:
        """Nothing to free."""
        self._running.clear()
        self._waiting.clear()


def build_null_core(
    config: EngineConfig,
    tokens: list[int],
    step_s: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
) -> NullCore:
    """Factory for ``CoreSpec``."""
    return NullCore(config, tokens, step_s)
