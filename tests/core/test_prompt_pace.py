"""Prompts of a batch that nobody watches: as fast as the longest answer needs them, and no faster."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import pytest

from headrace.config import SchedulerConfig
from headrace.core import prompt_pace
from headrace.core.admission import OutputLengthEstimator
from headrace.core.output import SchedulerOutput
from headrace.core.prompt_pace import EFFICIENT_ROWS, MIN_PROMPT_TOKENS, PromptPace, make_pace
from headrace.core.request import Request
from headrace.sampling_params import SamplingParams
from tests.engine.core_harness import VOCAB, CoreHarness

BUDGET = 8192
ENDLESS = {"max_stall_ms": math.inf, "max_num_batched_tokens": BUDGET, "max_num_seqs": 128}


class Batch:
    """A batch over the fake executor, and what each of its steps computed."""

    def __init__(self, **options: Any) -> None:
        self.harness = CoreHarness(num_blocks=4000, block_size=16, check=False, **{**ENDLESS, **options})
        self.steps: list[SchedulerOutput] = []
        schedule = self.harness.core.scheduler.schedule

        def recorded() -> SchedulerOutput | None:
            output = schedule()
            if output is not None:
                self.steps.append(output)
            return output

        self.harness.core.scheduler.schedule = recorded  # type: ignore[method-assign]
        self._rng = random.Random(0)

    def add(self, name: str, num_prompt_tokens: int, max_tokens: int, **options: Any) -> None:
        prompt = [self._rng.randrange(VOCAB) for _ in range(num_prompt_tokens)]
        self.harness.add(name, prompt, max_tokens, **options)

    def run(self) -> None:
        self.harness.run()
        self.harness.check_answers()

    @property
    def rows(self) -> list[int]:
        """Tokens of each step."""
        return [sum(step.num_tokens) for step in self.steps]

    def prompt_rows(self) -> list[int]:
        """Tokens of each step that are not decodes."""
        return [sum(n for n in step.num_tokens if n > 1) for step in self.steps]


def test_answers_of_one_length_give_prompts_the_whole_budget() -> None:
    batch = Batch()
    for number in range(60):
        batch.add(f"r{number}", 300, 30)
    batch.run()
    assert batch.rows[:2] == [BUDGET, BUDGET] and sum(batch.prompt_rows()[:3]) == 60 * 300
    assert len(batch.rows) <= 30 + 3


def falling(batch: Batch) -> None:
    for number in range(60):
        batch.add(f"r{number}", 300, 600 - 10 * number)


def test_prompts_of_ever_shorter_answers_ride_along() -> None:
    """Steps have the efficient size as long as there are prompts, and the batch takes no more steps for it."""
    paced, full = Batch(), Batch()
    full.harness.core.scheduler.pace.is_on = False
    falling(paced)
    falling(full)
    with mock.patch.object(PromptPace, "_plan", autospec=True, side_effect=PromptPace._plan) as plan:
        paced.run()
    full.run()
    assert max(full.rows) == BUDGET
    assert set(paced.rows[:30]) == {EFFICIENT_ROWS} and max(paced.rows) == EFFICIENT_ROWS
    assert len(paced.rows) <= len(full.rows) + 1
    assert plan.call_count <= 4  # of 36 steps with prompts


def test_one_long_answer_late_in_the_queue_hurries_all_before_it_and_none_after() -> None:
    batch = Batch()
    for number in range(80):
        batch.add(f"r{number}", 300, 900 if number == 40 else 50)
    batch.run()
    assert batch.prompt_rows()[0] == BUDGET and sum(batch.prompt_rows()[:2]) == 41 * 300
    assert batch.steps[1].request_ids[-1] == "r40" and max(batch.rows[2:]) == EFFICIENT_ROWS


def beside_decodes(count: int) -> Batch:
    """A run of a long prompt, "late", behind so many streams."""
    batch = Batch()
    for number in range(count):
        batch.add(f"r{number}", 4, 400)
    batch.add("late", 300, 4)
    batch.run()
    return batch


def test_prompts_always_advance() -> None:
    with mock.patch.multiple(prompt_pace, EFFICIENT_ROWS=8, _TILE_ROWS=1):
        batch = beside_decodes(40)
    chunks = [n for s in batch.steps for i, n in zip(s.request_ids, s.num_tokens, strict=True) if i == "late"]
    assert chunks[:15] == [MIN_PROMPT_TOKENS] * 15


def test_answers_that_nothing_ends_are_known() -> None:
    """Of others so much is expected as those took that have ended."""
    pace = Batch().harness.core.scheduler.pace
    requests = [
        Request("r", [1, 2, 3], params, max_tokens=100, eos_token_ids=frozenset({9}))
        for params in (
            SamplingParams(ignore_eos=True),
            SamplingParams(),
            SamplingParams(ignore_eos=True, stop="x"),
            SamplingParams(ignore_eos=True, stop_token_ids=[5]),
        )
    ]
    assert pace._answers_of(requests) == [100, 81, 81, 81]


def test_prompts_fill_up_what_products_are_padded_to() -> None:
    """More decodes than the efficient size: the step is padded, so the prompt has more than its least share."""
    with mock.patch.multiple(prompt_pace, EFFICIENT_ROWS=8, _TILE_ROWS=64):
        batch = beside_decodes(70)
    assert [rows for rows in batch.rows if 1 < rows < 1000][1:5] == [128] * 4


def test_forks_wait_for_no_prompt() -> None:
    with mock.patch.multiple(prompt_pace, EFFICIENT_ROWS=MIN_PROMPT_TOKENS, _TILE_ROWS=1):
        batch = Batch()
        batch.add("longest", 1, 300)
        batch.add("family", 20, 10, n=4)
        batch.add("prompt", 400, 10)
        batch.run()
    assert batch.steps[1].request_ids == [
        "longest",
        "family",
        "prompt",
    ]  # the step in which the leader is ready
    assert batch.steps[2].request_ids[:3] == ["longest", "family", "prompt"]
    assert batch.steps[2].request_ids[3:] == ["family#1", "family#2", "family#3"]


def test_a_stream_that_knows_more_than_its_prompt_waits_for_no_prompt() -> None:
    pace = Batch().harness.core.scheduler.pace
    request, step = mock.Mock(num_prompt_tokens=10), mock.Mock(num_tokens=BUDGET, num_decodes=0, step_id=0)
    assert pace.is_on and pace.cut(request, 10, 7, step) == 7 and pace.cut(request, 9, 7, step) == 0


@pytest.mark.parametrize(
    ("options", "num_micro_batches", "is_on"),
    [
        ({}, 1, True),
        ({"policy": "priority"}, 1, True),
        ({}, 2, False),
        ({"max_stall_ms": 250.0}, 1, False),
        ({"max_stall_ms": None}, 1, False),
        ({"batching": "prefill-first"}, 1, False),
        ({"batching": "static"}, 1, False),
    ],
)
def test_only_where_no_stall_is_too_long(
    options: dict[str, Any], num_micro_batches: int, is_on: bool
) -> None:
    config = SchedulerConfig(**{**ENDLESS, **options})
    assert make_pace(config, mock.Mock(), OutputLengthEstimator(), num_micro_batches).is_on is is_on
