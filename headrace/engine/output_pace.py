"""OutputPace: how often a stream's tokens leave the core, where sending them takes the cores that compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headrace.core.output import EngineCoreOutput, EngineCoreRequest

MAX_CHUNKS_PER_S = 400
"""Chunks that all streams together may have in a second. One costs the API's process 60 us, and a client on the same
machine as much: 400 are 3 % of two cores."""

MAX_GAP_S = 0.04
"""Chunks of a stream follow one another so soon, give or take half a step: 25 a second look like a flow."""

FEW_STREAMS = 4
"""So many have every token at once, however fast they are."""

MAX_HOLD_S = 1.0
"""Nothing waits longer: not an answer that is read as a whole, whose reader would get what came until then if it were
cancelled, nor a stream that is preempted in the middle of an interval that the user chose."""

_Key = tuple[str, int]


class OutputPace:
    """Holds news of running answers back and merges them, so that messages, texts and chunks become fewer.

    The first and the last news of an answer never wait. All streams that wait go out together.

    Args:
        interval: steps whose tokens go out together; None: as many as ``MAX_CHUNKS_PER_S`` asks for.
        clock: seconds, rising.
    """

    def __init__(self, interval: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._whole: dict[str, int] = {}  # answers still to end of requests that are read as a whole
        self._begun: set[_Key] = set()
        self._streams: dict[_Key, EngineCoreOutput] = {}
        self._wholes: dict[_Key, EngineCoreOutput] = {}
        self._num_steps = 0  # since streams went out
        self._streams_out_at = self._wholes_since = self._last_step_at = 0.0

    def expect(self, request: EngineCoreRequest) -> None:
        """The core has taken a request."""
        if request.is_read_whole:
            self._whole[request.request_id] = request.sampling_params.num_told_answers

    def flush(self) -> list[EngineCoreOutput]:
        """All that streams wait for, because the next step may be a long one."""
        self._num_steps, self._streams_out_at = 0, self._clock()
        held, self._streams = self._streams, {}
        return list(held.values())

    def take(self, news: Sequence[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """A step's news (in order); what of them, and of what was held, goes out now."""
        if self._interval == 1 and not (self._whole or self._begun):
            return list(news)
        now = self._clock()
        if not self._wholes:
            self._wholes_since = now
        out = [item for own in map(self._hold, news) for item in own]
        if self._streams and self._streams_are_due(now):
            out += self.flush()
        if self._wholes and now - self._wholes_since >= MAX_HOLD_S:
            out += self._wholes.values()
            self._wholes = {}
        self._last_step_at = now
        return out

    def _hold(self, item: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Put news to those that wait; what goes out of them at once: an answer's first and last.

        An end without a token of its own is not merged: the last token before it would be taken for the one that
        stopped the answer, which is no part of the text.
        """
        key = (item.request_id, item.child_index)
        held = self._wholes if item.request_id in self._whole else self._streams
        is_running = item.finish_reason is None and key in self._begun
        if not is_running:
            self._tell(item, key)
        older = held.pop(key, None)
        if older is not None:
            if item.finish_reason is not None and not item.new_token_ids:
                return [older, item]
            _append(older, item)
            item = older
        if is_running:
            held[key] = item
            return []
        return [item]

    def _tell(self, item: EngineCoreOutput, key: _Key) -> None:
        """An answer's first or last news go out."""
        if item.finish_reason is None:
            if item.new_token_ids:
                self._begun.add(key)
            return
        self._begun.discard(key)
        num_left = self._whole.get(item.request_id, 0) - 1
        if num_left > 0:
            self._whole[item.request_id] = num_left
        else:
            self._whole.pop(item.request_id, None)

    def _streams_are_due(self, now: float) -> bool:
        """Whether streams go out after this step, rather than after the next: which is nearer to the gap that their
        number asks for."""
        self._num_steps += 1
        since = now - self._streams_out_at
        if self._interval is not None:
            return self._num_steps >= self._interval or since >= MAX_HOLD_S
        num_streams = len(self._streams)
        gap = min(num_streams / MAX_CHUNKS_PER_S, MAX_GAP_S)
        return num_streams <= FEW_STREAMS or since + (now - self._last_step_at) / 2 >= gap


def _append(older: EngineCoreOutput, newer: EngineCoreOutput) -> None:
    """Put the news of one answer behind those that were held."""
    older.new_token_ids = older.new_token_ids + newer.new_token_ids
    if newer.logprobs is not None:
        older.logprobs = (older.logprobs or []) + newer.logprobs
    if newer.prompt_logprobs is not None:
        older.prompt_logprobs = (older.prompt_logprobs or []) + newer.prompt_logprobs
    older.finish_reason, older.stop_reason = newer.finish_reason, newer.stop_reason
    older.message, older.refusal = newer.message, newer.refusal
    older.num_cached_tokens = newer.num_cached_tokens or older.num_cached_tokens
    older.timeline = newer.timeline
