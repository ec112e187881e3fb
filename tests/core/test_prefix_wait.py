"""Requests that arrive together share what one of them computes; long prompts do not hold up short ones."""

from __future__ import annotations

import pytest

from headrace.core.cost_model import CostModel, StepFeatures
from headrace.core.prefix_wait import (
    MIN_SAVED_TOKENS,
    SAVED_TOKENS_BOUNDS,
    _common_prefix,
    least_saved_tokens,
)
from tests.engine.core_harness import CoreHarness

SHARED = [(7 * i) % 50 for i in range(200)]


def model_of(fixed_ms: float, ms_per_token: float) -> CostModel:
    """Fitted to steps of prompts that take so long."""
    model = CostModel()
    for num_tokens in [*range(70, 90), *range(400, 420)]:
        model.observe(StepFeatures(num_tokens), fixed_ms + ms_per_token * num_tokens)
    return model


def test_equal_beginnings_are_computed_once() -> None:
    harness = CoreHarness(
        num_blocks=400, max_num_seqs=16, max_num_batched_tokens=64, max_prefill_chunk=32, lag=1
    )
    for number in range(8):
        harness.add(f"r{number}", [*SHARED, number, 3], 4)
    harness.run()
    harness.check_answers()
    computed = harness.core.stats().num_computed_tokens
    assert computed <= len(SHARED) + 8 * (6 + 4)
    causes = [cause for _, _, cause in harness.answers[("r5", 0)].timeline.events]
    assert any("prefix that another request computes" in cause for cause in causes)


@pytest.mark.parametrize(("fixed_ms", "waits"), [(10.0, True), (19.0, True), (21.0, False), (100.0, False)])
def test_a_request_waits_if_the_shared_tokens_cost_more_than_a_step(fixed_ms: float, waits: bool) -> None:
    """200 tokens of 0.1 ms against a step of so many."""
    harness = CoreHarness(num_blocks=400, max_num_batched_tokens=512)
    harness.core.scheduler.cost_model = model_of(fixed_ms, 0.1)
    for number in range(2):
        harness.add(f"r{number}", [*SHARED, number, 3], 4)
    harness.run()
    harness.check_answers()
    causes = [cause for _, _, cause in harness.answers[("r1", 0)].timeline.events]
    assert any("prefix that another request computes" in cause for cause in causes) is waits
    computed = harness.core.stats().num_computed_tokens
    assert (computed < 2 * len(SHARED)) is waits


def test_how_many_tokens_are_worth_a_wait_has_bounds_and_is_64_until_known() -> None:
    assert least_saved_tokens(CostModel()) == MIN_SAVED_TOKENS == 64
    assert least_saved_tokens(model_of(0.0, 0.1)) == SAVED_TOKENS_BOUNDS[0]
    assert least_saved_tokens(model_of(100.0, 0.0)) == SAVED_TOKENS_BOUNDS[1]
    assert least_saved_tokens(model_of(10.0, 0.1)) == pytest.approx(100, abs=5)


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_those_who_wait_go_on_when_the_computing_request_ends(end: str) -> None:
    harness = CoreHarness(num_blocks=400, max_num_batched_tokens=32)
    for number in range(4):
        harness.add(f"r{number}", [*SHARED, number, 3], 4)
    for _ in range(2):
        harness.step()
    if end == "abort":
        harness.core.abort_requests(["r0"])
    harness.run()
    harness.check_answers()


def test_other_namespaces_and_switched_off_caches_do_not_wait() -> None:
    for options in ({"prefix_caching": False}, {}):
        harness = CoreHarness(num_blocks=400, max_num_batched_tokens=512, **options)  # type: ignore[arg-type]
        for number in range(3):
            harness.add(f"r{number}", [*SHARED, number], 3, namespace=f"tenant{number}")
        harness.step()
        assert len(harness.core.scheduler.lifecycle.running) == 3
        harness.run()
        harness.check_answers()


def test_a_short_prompt_beside_a_long_one_starts_soon() -> None:
    harness = CoreHarness(num_blocks=400, max_num_batched_tokens=32)
    harness.add("long", [(11 * i) % 50 for i in range(900)], 4)
    for _ in range(3):
        harness.step()
    harness.add("short", [1, 2, 3, 4, 5, 6, 7, 8], 2)
    for _ in range(4):
        harness.step()
    assert harness.answers[("short", 0)].token_ids
    assert not harness.answers[("long", 0)].token_ids
    harness.run()
    harness.check_answers()


def test_prompts_of_like_lengths_go_one_after_the_other() -> None:
    """Side by side the first would end later and the last no sooner."""
    harness = CoreHarness(num_blocks=400, max_num_batched_tokens=32)
    for number in range(3):
        harness.add(f"r{number}", [(number + 11 * i) % 50 for i in range(300)], 2)
    steps = dict.fromkeys(range(3), 0)
    for step in range(1, 60):
        harness.step()
        for number in steps:
            if not steps[number] and harness.answers[(f"r{number}", 0)].token_ids:
                steps[number] = step
    assert steps == {0: 10, 1: 19, 2: 29}
    harness.check_answers()


def test_a_long_prompt_that_is_cached_counts_as_a_short_one() -> None:
    known, unknown = [(11 * i) % 50 for i in range(400)], [(13 * i + 7) % 50 for i in range(300)]
    harness = CoreHarness(num_blocks=400, max_num_batched_tokens=32)
    harness.add("first", known, 2)
    harness.run()
    harness.add("long", unknown, 2)
    harness.step()
    harness.add("cached", [*known, 1, 2], 2)
    for _ in range(4):
        harness.step()
    assert harness.answers[("cached", 0)].token_ids and not harness.answers[("long", 0)].token_ids
    harness.run()
    harness.check_answers()


def test_common_prefix_is_exact() -> None:
    for length in (0, 1, 2, 3, 17, 64, 100):
        a = list(range(100))
        b = [*range(length), *([-1] * (100 - length))]
        assert _common_prefix(a, b) == length
        assert _common_prefix(a[:50], b) == min(length, 50)
