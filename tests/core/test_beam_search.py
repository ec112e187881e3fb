"""Beams as requests: the search's own answers whatever happens to memory, steps in flight and neighbours."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.beam_scores import BeamScores
from headrace.errors import CapacityError
from headrace.runtime.fake_executor import fake_logprobs
from tests.engine.core_harness import HYBRID, VOCAB, CoreHarness, next_token

PROMPT = [(5 * i) % 50 for i in range(23)]
BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0.0, "ignore_eos": True}


def expected(
    prompt: list[int], width: int, max_tokens: int, stops: frozenset[int] = frozenset()
) -> list[list[int]]:
    """The search over the made-up model, without an engine."""
    scores = BeamScores(
        width, length_penalty=1.0, early_stopping=False, max_tokens=max_tokens, stop_token_ids=stops
    )
    while not scores.is_done:
        entries = []
        for beam in scores.beams:
            tokens = [*prompt, *([] if beam is None else [link.token for link in beam.path()])]
            entries.append(fake_logprobs(next_token(tokens, 0), scores.num_candidates, VOCAB))
        scores.advance(entries)
    return [[link.token for link in hypothesis.path()] for _, hypothesis in scores.finished]


def found(harness: CoreHarness, name: str, n: int) -> list[list[int]]:
    return [harness.answers[(name, child)].token_ids for child in range(n)]


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("specs", ["full", "hybrid"])
def test_beams_are_the_searchs(lag: int, specs: str) -> None:
    options = {"specs": HYBRID} if specs == "hybrid" else {}
    harness = CoreHarness(num_blocks=200, lag=lag, max_steps_outstanding=lag + 1, **options)
    harness.add("beams", PROMPT, 12, n=3, best_of=4, **BEAMS)
    harness.add("other", PROMPT[:9], 20)
    harness.add("short", PROMPT[:1], 5, n=2, **BEAMS)
    harness.run()
    assert found(harness, "beams", 3) == expected(PROMPT, 4, 12)[:3]
    assert found(harness, "short", 2) == expected(PROMPT[:1], 2, 5)
    assert {harness.answers[("beams", child)].finish_reason for child in range(3)} == {"length"}
    del harness.answers[("beams", 0)], harness.answers[("beams", 1)], harness.answers[("beams", 2)]
    del harness.answers[("short", 0)], harness.answers[("short", 1)]
    harness.check_answers()


def test_stop_tokens_end_answers() -> None:
    harness = CoreHarness(num_blocks=200)
    stops = frozenset({3, 17, 30})
    harness.add("beams", PROMPT, 30, n=3, stop_token_ids=sorted(stops), **BEAMS)
    harness.run()
    assert found(harness, "beams", 3) == expected(PROMPT, 3, 30, stops)
    answers = [harness.answers[("beams", child)] for child in range(3)]
    assert all((answer.token_ids[-1] in stops) == (answer.finish_reason == "stop") for answer in answers)
    assert any(answer.finish_reason == "stop" for answer in answers)


@pytest.mark.parametrize("num_blocks", [30, 36, 44])
def test_tight_memory_preempts_and_changes_nothing(num_blocks: int) -> None:
    harness = CoreHarness(num_blocks=num_blocks, max_num_batched_tokens=64, lag=1, max_steps_outstanding=2)
    for number in range(3):
        harness.add(f"other{number}", PROMPT[: 9 + number], 40, ignore_eos=True)
    for number in range(3):
        harness.add(f"beams{number}", PROMPT[number:], 14, n=3, **BEAMS)
    harness.run()
    for number in range(3):
        assert found(harness, f"beams{number}", 3) == expected(PROMPT[number:], 3, 14)
    assert harness.core.stats().num_preemptions > 0


def test_more_beams_than_seats_at_once_wait_for_each_other() -> None:
    harness = CoreHarness(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(4):
        harness.add(f"beams{number}", PROMPT[number:], 9, n=3, **BEAMS)
    peak = 0
    while harness.core.has_work():
        harness.step()
        peak = max(peak, len(harness.core.scheduler.lifecycle.running))
    harness.assert_nothing_held()
    assert peak <= 4
    for number in range(4):
        assert found(harness, f"beams{number}", 3) == expected(PROMPT[number:], 3, 9)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_a_cancel_ends_all_beams(steps: int) -> None:
    harness = CoreHarness(num_blocks=200, lag=1, max_steps_outstanding=2)
    harness.add("beams", PROMPT, 30, n=2, best_of=4, **BEAMS)
    for _ in range(steps):
        harness.step()
    harness.core.abort_requests(["beams"])
    harness.run()
    assert {harness.answers[("beams", child)].finish_reason for child in range(2)} == {"abort"}


def test_beams_share_what_they_have_in_common() -> None:
    """Blocks held are never more than what the tree of running beams needs, plus one being written by each."""
    harness = CoreHarness(num_blocks=400, block_size=4)
    harness.add("beams", PROMPT, 40, n=4, **BEAMS)
    while harness.core.has_work():
        harness.step()
        requests = list(harness.core.scheduler.lifecycle.requests.values())
        if len(requests) == 4:
            blocks = {block for request in requests for block in request.block_table[0]}
            prefixes = {
                tuple(request.token_ids[: end + 4])
                for request in requests
                for end in range(0, request.num_computed_tokens, 4)
            }
            assert len(blocks) <= len(prefixes) + 4


def test_logprobs_are_those_of_the_chosen_tokens() -> None:
    harness = CoreHarness(num_blocks=200)
    entries: dict[int, Any] = {}
    harness.add("beams", PROMPT, 6, n=2, logprobs=3, **BEAMS)
    while harness.core.has_work():
        for item in harness.step():
            entries[item.child_index] = item.logprobs
    for child in range(2):
        tokens = list(PROMPT)
        for token, entry in zip(harness.answers[("beams", child)].token_ids, entries[child], strict=True):
            whole = fake_logprobs(next_token(tokens, 0), -1, VOCAB)
            assert entry.token_ids == [token, *whole.token_ids[1:4]]
            assert entry.logprobs[0] == whole.logprobs[whole.token_ids.index(token, 1)]
            assert entry.rank == whole.token_ids.index(token, 1)
            tokens.append(token)


def test_what_can_never_run_is_refused() -> None:
    harness = CoreHarness(num_blocks=30, max_num_seqs=4)
    for options in ({"n": 5}, {"n": 4, "max_tokens": 60}):
        with pytest.raises(CapacityError, match="best_of") as refusal:
            harness.add("beams", PROMPT, **{"max_tokens": 5, **BEAMS, **options})
        assert refusal.value.param == "best_of"
    assert not harness.core.has_work()
