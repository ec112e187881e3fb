"""OutputProcessor: from the engine core's news to what users read."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from headrace.core.output import EngineCoreOutput, EngineCoreRequest
from headrace.core.timeline import Timeline
from headrace.engine.answer import Answer, best_answers
from headrace.engine.logprob_text import logprob_dict
from headrace.engine.receipt import metrics_of
from headrace.grammar.answer_check import AnswerChecks
from headrace.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.tokenizer.base import Tokenizer


class RequestOutputKind(enum.Enum):
    """What the outputs of a request hold, and when they come. Names follow vLLM's.

    CUMULATIVE: at each step with news, all answers from their beginning.
    DELTA: at each step with news, the new part of the answers that have one.
    FINAL_ONLY: one output, when all answers are finished; always so when only the best of several are given.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def is_read_whole(params: SamplingParams, kind: RequestOutputKind) -> bool:
    """Whether a request's tokens may all come at its end: its reader gets one output, and no stop string must be looked
    for meanwhile."""
    return _own_kind(params, kind) is RequestOutputKind.FINAL_ONLY and not params.stop_strings


def _own_kind(params: SamplingParams, kind: RequestOutputKind) -> RequestOutputKind:
    return kind if params.num_told_answers == params.n else RequestOutputKind.FINAL_ONLY


class Processed(NamedTuple):
    """The yield of some news.

    outputs: for users, at most one a request.
    stopped: (request id, child index) of answers whose text met a stop string; the core must be told to end them
        (``EngineCore.abort_child``). They are finished for the user already.
    """

    outputs: list[RequestOutput]
    stopped: list[tuple[str, int]]


class OutputProcessor:
    """Holds the state of every request on the user's side: text so far, stop strings, log-probabilities.

    Args:
        tokenizer: None when the engine deals in token ids only; text stays empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RequestState] = {}
        self._checks = AnswerChecks()

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None = None,
        kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> None:
        """Expect news of a request. Call it before the engine core gets the request."""
        assert request.request_id not in self._requests
        self._requests[request.request_id] = _RequestState(
            request, prompt, kind, self._tokenizer, self._checks
        )

    def process(self, news: Iterable[EngineCoreOutput]) -> Processed:
        """Take in one step's news. News of requests that were forgotten are ignored.

        An output of an answer that a stop string ended has no timeline yet; it is filled into that same object
        when the core has confirmed the end.
        """
        touched: dict[str, _RequestState] = {}
        stopped: list[tuple[str, int]] = []
        for item in news:
            state = self._requests.get(item.request_id)
            if state is None:
                continue
            if state.take(item):
                stopped.append((item.request_id, item.child_index))
            touched[item.request_id] = state
        outputs = []
        for request_id, state in touched.items():
            output = state.make_output()
            if output is not None:
                outputs.append(output)
            if not state.num_core_running:
                state.fill_timeline()
                del self._requests[request_id]
        return Processed(outputs, stopped)

    def end(self, request_id: str, reason: str, error: str | None = None) -> RequestOutput | None:
        """Finish a request from this side: "error" when the core refused it or died, "abort" when the user left.

        Returns: its last output, or None if it is unknown or had its last output already.
        """
        state = self._requests.pop(request_id, None)
        return None if state is None else state.end(reason, error)

    @property
    def num_violations(self) -> int:
        """Finished answers that were not what their constraint asked for."""
        return self._checks.num_violations

    @property
    def request_ids(self) -> list[str]:
        """Requests that are not forgotten."""
        return list(self._requests)


class _RequestState:
    """One request: its answers, and what has been given out.

    num_core_running: answers of which the core has more to say, if only that it ended them.
    """

    __slots__ = (
        "_final",
        "_kind",
        "_num_unfinished",
        "_prompt",
        "_prompt_logprobs",
        "_request",
        "_tokenizer",
        "_touched",
        "answers",
        "num_cached_tokens",
        "num_core_running",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        kind: RequestOutputKind,
        tokenizer: Tokenizer | None,
        checks: AnswerChecks,
    ) -> None:
        params = request.sampling_params
        self._request = request
        self._prompt = prompt
        self._kind = _own_kind(params, kind)
        self._tokenizer = tokenizer if params.detokenize else None
        self._final: RequestOutput | None = None
        self._touched: list[Answer] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * max(params.logprobs_from, 1)
        self.answers = [
            Answer(index, request.prompt_token_ids, params, tokenizer, request.constraint, checks)
            for index in range(params.num_told_answers)
        ]
        self.num_cached_tokens = 0
        self._num_unfinished = self.num_core_running = len(self.answers)

    def take(self, news: EngineCoreOutput) -> bool:
        """Add news of one answer. Returns True if it met a stop string."""
        answer = self.answers[news.child_index]
        if news.prompt_logprobs and self._prompt_logprobs is not None:
            self._prompt_logprobs += [logprob_dict(e, self._tokenizer) for e in news.prompt_logprobs]
        if news.num_cached_tokens and news.child_index == 0:
            self.num_cached_tokens = news.num_cached_tokens
        was_finished = answer.finish_reason is not None
        is_stopped = answer.take(news)
        if news.finish_reason is not None:
            self.num_core_running -= 1
        if was_finished:
            return False
        if answer.finish_reason is not None:
            self._num_unfinished -= 1
        elif not news.new_token_ids:
            return False
        if answer not in self._touched:
            self._touched.append(answer)
        return is_stopped

    def end(self, reason: str, error: str | None) -> RequestOutput | None:
        """Finish all answers that are not; the last output, unless it was given already."""
        self._touched = [answer for answer in self.answers if answer.finish_reason is None]
        for answer in self._touched:
            answer.end(reason, error)
        self._num_unfinished = 0
        return self.make_output()

    def make_output(self) -> RequestOutput | None:
        """What the user gets now, or None if there is nothing to give."""
        if self._final is not None:
            return None
        touched, self._touched = self._touched, []
        is_finished = self._num_unfinished == 0
        if self._kind is RequestOutputKind.DELTA:
            answers = [answer.delta() for answer in touched]
        elif self._kind is RequestOutputKind.CUMULATIVE:
            answers = [answer.whole() for answer in self.answers] if touched else []
        else:
            answers = [answer.whole() for answer in self.answers] if is_finished else []
            answers = best_answers(answers, self._request.sampling_params.n)
        if not answers:
            return None
        output = self._wrap(answers, is_finished)
        if is_finished:
            self._final = output
        return output

    def _wrap(self, answers: list[CompletionOutput], is_finished: bool) -> RequestOutput:
        prompt_logprobs = self._prompt_logprobs
        if self._kind is RequestOutputKind.DELTA:
            self._prompt_logprobs = None  # given once
        return RequestOutput(
            self._request.request_id,
            self._prompt,
            self._request.prompt_token_ids,
            answers,
            is_finished,
            prompt_logprobs,
            self.num_cached_tokens,
        )

    def fill_timeline(self) -> None:
        """Put timeline and metrics into the last output."""
        timelines = [answer.timeline or Timeline() for answer in self.answers]
        if self._final is not None:
            self._final.timeline = timelines[0].events
            self._final.metrics = metrics_of(self._request.arrival_time, timelines)
