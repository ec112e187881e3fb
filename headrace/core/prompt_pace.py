"""The pace of prompts where no stall is too long: they ride along with the decodes instead of running ahead of them.

A matrix product of ``EFFICIENT_ROWS`` costs about as little a row as one of many thousands, while a step of few decodes
is bound by reading weights. So prompts that need not hurry fill up the steps of decodes. How much they must hurry
follows from the answers: with L steps to go until the longest answer ends, an answer of a tokens may start L - a steps
from now, its slack, and the prompts up to it in order must be computed by then. Where all answers are of one length
there is no slack, and prompts get the whole budget. (That decodes cost little beside a chunk is the idea of SARATHI,
Agrawal et al. 2023; how large the chunk is follows here from what is still to come.)
"""

from __future__ import annotations

import math

from headrace.config import SchedulerConfig
from headrace.core.admission import OutputLengthEstimator
from headrace.core.lifecycle import Lifecycle
from headrace.core.request import Request
from headrace.core.step import Step

EFFICIENT_ROWS = 512
"""A step of so many tokens costs as little a token as longer ones do: 18.4 us on an H200 with an 8B model, 19.5 us in
steps of 8,192."""

MIN_PROMPT_TOKENS = 16
"""Prompts get so many tokens of a step, however many decodes it has."""

_TILE_ROWS = 128
"""Steps of up to 1,024 tokens have multiples of it, longer ones of twice as much (``cuda_graph.BUCKETS``)."""

_PERIOD = 16
"""Steps that a look at all requests serves for; more where there are more than 16 times ``_REQUESTS_A_STEP``."""

_REQUESTS_A_STEP = 32
"""Requests that may be looked at in a step, on average."""


class PromptPace:
    """How many prompt tokens may join a step.

    Streams are never held back: neither decodes, nor tokens known beyond a prompt (forced by a grammar, say), nor
    forks. What the prefix cache holds of a waiting request is not known before it starts: its whole prompt counts, so
    that prompts that share much are computed sooner than they need be.

    Args:
        is_on: False lets prompts have whatever the budget leaves.
    """

    def __init__(
        self, lifecycle: Lifecycle, estimator: OutputLengthEstimator, max_step_tokens: int, is_on: bool
    ) -> None:
        self.is_on = is_on
        self._lifecycle = lifecycle
        self._estimator = estimator
        self._max_step_tokens = max_step_tokens
        self._least_rows = 0
        self._prompt_rows = 0
        self._urgent: Request | None = None
        self._planned_step = self._next_step = 0
        self._num_waiting = 0

    def room(self, step: Step) -> int:
        """How many more prompt tokens may join a step; its decodes must be in it already."""
        most = self._max_step_tokens
        if self.is_on:
            if self._is_due(step.step_id):
                self._plan(step.step_id)
            prompt_rows = max(MIN_PROMPT_TOKENS, self._prompt_rows)
            most = min(most, _whole_tiles(max(self._least_rows, step.num_decodes + prompt_rows)))
        return max(0, most - step.num_tokens)

    def cut(self, request: Request, start: int, wanted: int, step: Step) -> int:
        """How many of a request's next ``wanted`` tokens, from position ``start``, may join a step."""
        if not self.is_on or start >= request.num_prompt_tokens:
            return wanted
        return min(wanted, self.room(step))

    def _is_due(self, step_id: int) -> bool:
        """Whether a new plan is needed: the last one is old, the prompts that had to hurry are in (be it in this very
        step, which then has no more than they needed), or many requests came."""
        if step_id == self._planned_step:
            return False
        lifecycle, urgent = self._lifecycle, self._urgent
        return (
            step_id >= self._next_step
            or lifecycle.num_waiting > 2 * self._num_waiting + _PERIOD
            or not lifecycle.running
            or (urgent is not None and _has_its_prompt(urgent))
        )

    def _plan(self, step_id: int) -> None:
        """Look at all requests: which rows the steps to come should have."""
        lifecycle = self._lifecycle
        requests = [*lifecycle.running, *lifecycle.preparation, *lifecycle.waiting]
        answers = self._answers_of(requests)
        longest = max(1, *answers)
        ahead, need, urgent = 0, 0.0, None
        for request, answer in zip(requests, answers, strict=True):
            if request.num_computed_tokens < request.num_prompt_tokens:
                ahead += _to_compute(request)
                pace = ahead / max(1, longest - answer)
                if pace > need:
                    need, urgent = pace, request
        mean_rows = math.ceil((sum(answers) + ahead) / longest)
        self._least_rows = max(EFFICIENT_ROWS, mean_rows)
        self._prompt_rows = math.ceil(need)
        self._urgent = urgent if self._prompt_rows + len(lifecycle.running) > self._least_rows else None
        self._planned_step, self._num_waiting = step_id, lifecycle.num_waiting
        self._next_step = step_id + max(_PERIOD, len(requests) // _REQUESTS_A_STEP)

    def _answers_of(self, requests: list[Request]) -> list[int]:
        """Tokens that each is still to generate: known where nothing ends the answer before its limit."""
        expected = self._estimator.remaining_of(requests)
        for index, request in enumerate(requests):
            if request.runs_to_limit:
                expected[index] = request.max_total_tokens - len(request.token_ids)
        return expected


def make_pace(
    config: SchedulerConfig, lifecycle: Lifecycle, estimator: OutputLengthEstimator, num_micro_batches: int
) -> PromptPace:
    """The pace that suits a scheduler. It is on where batching is continuous and ``max_stall_ms`` infinite (otherwise
    the cost model cuts prompts), but for a pipeline, whose micro-batches have a part of the decodes each."""
    is_endless = config.batching == "continuous" and math.isinf(config.stall_limit_ms)
    return PromptPace(
        lifecycle, estimator, config.max_step_tokens, is_on=is_endless and num_micro_batches == 1
    )


def _whole_tiles(num_rows: int) -> int:
    """The next size that products of matrices fill and that graphs are captured for: a step of fewer rows is padded to
    it, so that prompts may have the rest for nothing."""
    grain = _TILE_ROWS if num_rows <= 8 * _TILE_ROWS else 2 * _TILE_ROWS
    return math.ceil(num_rows / grain) * grain


def _to_compute(request: Request) -> int:
    """Tokens that a request is to compute before its next sample; a sibling's fork has its prompt from the leader."""
    if request.parent is not None and not request.block_table and not request.timeline.num_preemptions:
        return 0
    return len(request.token_ids) + request.num_placeholders - request.num_computed_tokens


def _has_its_prompt(request: Request) -> bool:
    return request.is_finished or request.num_computed_tokens >= request.num_prompt_tokens
