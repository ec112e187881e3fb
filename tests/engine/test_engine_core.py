"""What EngineCore promises: exact answers at every D, sharing, preemption, limits, typed refusals."""

from __future__ import annotations

import itertools

import pytest

from headrace.core.output import EngineCoreRequest
from headrace.errors import CapacityError, RequestError
from tests.engine.core_harness import FULL, HYBRID, CoreHarness

PROMPT = list(range(1, 23))


@pytest.mark.parametrize("outstanding", [1, 2, 3, 4])
def test_answers_do_not_depend_on_steps_outstanding(outstanding: int) -> None:
    harness = CoreHarness(lag=outstanding - 1, max_steps_outstanding=outstanding)
    harness.add("long", PROMPT, 20)
    harness.add("stops", PROMPT[:5], 40, stop_token_ids=list(range(0, 50, 9)))
    harness.add("many", PROMPT[:9], 11, n=3)
    harness.run()
    harness.check_answers()


def test_keeps_several_steps_outstanding() -> None:
    harness = CoreHarness(lag=3, max_steps_outstanding=4)
    harness.add("a", PROMPT, 30)
    most = 0
    while harness.core.has_work():
        harness.step()
        most = max(most, harness.executor.num_steps_outstanding)
    assert most == 3  # four launched, the oldest taken in by the same call


def test_no_step_is_launched_ahead_while_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch may wait for a kernel, and the results of the step before it would wait with it."""
    harness = CoreHarness(lag=3, max_steps_outstanding=4)
    is_compiling = True
    monkeypatch.setattr(type(harness.executor), "is_compiling", property(lambda executor: is_compiling))
    harness.add("a", PROMPT, 30)
    for _ in range(10):
        harness.step()
        assert harness.executor.num_steps_outstanding == 0
    is_compiling = False
    harness.step()
    assert harness.executor.num_steps_outstanding == 3
    harness.run()
    harness.check_answers()


def test_a_request_that_may_not_run_ahead_waits_for_its_result() -> None:
    harness = CoreHarness(lag=2, max_steps_outstanding=3)
    harness.add("careful", PROMPT, 12, bad_word_ids=[[90, 91]])
    harness.add("free", PROMPT[:7], 12)
    while harness.core.has_work():
        harness.step()
        for request in harness.core.scheduler.lifecycle.running:
            assert request.may_run_ahead or request.num_steps_in_flight <= 1
    harness.check_answers()


def test_idle_time_goes_to_the_blocks_that_are_taken_next(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = CoreHarness(num_blocks=64)
    monkeypatch.setattr(harness.executor, "take_pages", lambda *ends: ends)
    assert harness.core.use_idle_time() == (0, 63)
    harness.add("one", PROMPT, 8)
    harness.run()
    taken, ends = harness.core.stats().num_cached_blocks, harness.core.use_idle_time()
    assert isinstance(ends, tuple) and ends != (0, 63)
    assert taken == ends[0] + 63 - ends[1]


def test_the_second_of_equal_prompts_hits_inside_a_block() -> None:
    harness = CoreHarness()
    harness.add("first", PROMPT, 4)
    harness.run()
    harness.add("second", [*PROMPT[:19], 49, 48], 4)
    harness.run()
    assert harness.answers[("second", 0)].num_cached_tokens == 19
    harness.check_answers()


def test_the_first_token_tells_what_was_cached() -> None:
    """A stop string may end the answer for its reader before the core does."""
    harness = CoreHarness()
    harness.add("first", PROMPT, 4)
    harness.run()
    harness.add("second", PROMPT, 4)
    news = harness.step() or harness.step()
    assert news[0].finish_reason is None
    harness.run()
    assert news[0].num_cached_tokens == harness.answers[("second", 0)].num_cached_tokens > 0


def test_namespaces_do_not_share() -> None:
    harness = CoreHarness()
    harness.add("first", PROMPT, 4, namespace="a")
    harness.run()
    harness.add("second", PROMPT, 4, namespace="b")
    harness.run()
    assert harness.answers[("second", 0)].num_cached_tokens == 0


def test_children_share_their_prompt_blocks() -> None:
    harness = CoreHarness(num_blocks=200, prefix_caching=False, max_num_batched_tokens=64)
    harness.add("family", PROMPT, 6, n=4)
    most_held = 0
    while harness.core.has_work():
        harness.step()
        most_held = max(most_held, harness.core.stats().num_held_blocks)
    harness.check_answers()
    shared, own = 21 // 4, -(-(len(PROMPT) + 6) // 4) - 21 // 4
    assert most_held <= shared + 4 * own


def test_one_child_can_be_stopped_while_its_siblings_go_on() -> None:
    harness = CoreHarness()
    harness.add("family", PROMPT, 10, n=3)
    for _ in range(5):
        harness.step()
    harness.core.abort_child("family", 1)
    harness.run()
    assert harness.answers[("family", 1)].finish_reason == "abort"
    harness.check_answers()


@pytest.mark.parametrize("specs, num_blocks", [(FULL, 14), (HYBRID, 42)])
def test_oversubscription_preempts_and_answers_stay_exact(specs: list[object], num_blocks: int) -> None:
    harness = CoreHarness(specs, num_blocks, lag=1, max_steps_outstanding=2)  # type: ignore[arg-type]
    for number in range(12):
        harness.add(f"r{number}", [number, *PROMPT[:6]], 25, ignore_eos=True)
    harness.run()
    harness.check_answers()
    assert harness.core.scheduler.lifecycle.num_preemptions > 0
    assert all(answer.timeline.num_preemptions <= 2 for answer in harness.answers.values())


def test_urgent_requests_preempt_and_finish_first() -> None:
    harness = CoreHarness(num_blocks=16, max_num_seqs=2, policy="priority")
    harness.add("slow", PROMPT[:8], 30, priority=5)
    harness.add("slower", PROMPT[:9], 30, priority=5)
    for _ in range(4):
        harness.step()
    harness.add("urgent", PROMPT[:7], 5, priority=0)
    finished = []
    while harness.core.has_work():
        finished += [item.request_id for item in harness.step() if item.finish_reason]
    assert finished[0] == "urgent"
    harness.check_answers()


def test_prompt_logprobs_come_once_and_in_order_despite_chunks_and_hits() -> None:
    harness = CoreHarness(max_prefill_chunk=5, lag=1, max_steps_outstanding=2)
    harness.add("warm", PROMPT, 3)
    harness.run()
    for name, start, expected in (("all", 0, PROMPT[1:]), ("tail", 15, PROMPT[15:])):
        harness.add(name, PROMPT, 3, prompt_logprobs=1, logprobs_from=start)
        entries: list[int] = []
        while harness.core.has_work():
            for item in harness.step():
                entries += [entry.token_ids[0] for entry in item.prompt_logprobs or ()]
        assert entries == expected
        assert harness.answers[(name, 0)].num_cached_tokens == max(start - 1, 0)


def test_refuses_what_can_never_fit_and_what_finds_the_queue_full() -> None:
    harness = CoreHarness(num_blocks=6, max_waiting_requests=2)
    with pytest.raises(CapacityError, match=r"24 tokens can never fit: the KV cache holds 24 tokens"):
        harness.add("huge", list(range(24)), 4)
    harness.add("a", [1, 2], 4)
    harness.add("b", [1, 2], 4)
    with pytest.raises(CapacityError, match="max_waiting_requests"):
        harness.add("c", [1, 2], 4)
    with pytest.raises(RequestError, match="'a' is in use"):
        harness.core.add_request(EngineCoreRequest("a", [1], harness.requests["a"].sampling_params, 4))
    harness.run()
    harness.check_answers()


def test_a_family_that_is_refused_leaves_nothing_behind() -> None:
    harness = CoreHarness(max_waiting_requests=2)
    with pytest.raises(CapacityError):
        harness.add("family", [1, 2, 3], 4, n=4)
    assert not harness.core.has_work()
    harness.add("family", [1, 2, 3], 4, n=2)
    harness.run()


def test_a_prompt_that_fills_the_cache_still_gets_its_token() -> None:
    harness = CoreHarness(num_blocks=6)
    harness.add("full", list(range(1, 24)), 8)
    harness.run()
    answer = harness.answers[("full", 0)]
    assert answer.finish_reason == "length" and len(answer.token_ids) == 1


def test_timeline_tells_the_whole_story() -> None:
    harness = CoreHarness()
    harness.add("a", PROMPT, 5)
    harness.run()
    timeline = harness.answers[("a", 0)].timeline
    assert [name for name, _, _ in timeline.events] == ["QUEUED", "RUNNING", "FINISHED"]
    assert len(timeline.token_times) == 5
    times = [time for _, time, _ in timeline.events]
    assert times == sorted(times)


def test_every_batching_gives_the_same_answers() -> None:
    for batching, chunk in itertools.product(("continuous", "prefill-first", "static"), (None, 1, 7)):
        harness = CoreHarness(num_blocks=30, batching=batching, max_prefill_chunk=chunk)
        for number in range(10):
            harness.add(f"r{number}", [*PROMPT[: 5 + number], number], 3 + number, ignore_eos=True)
        harness.run()
        harness.check_answers()


def test_static_batching_admits_only_when_the_batch_is_done() -> None:
    harness = CoreHarness(batching="static", num_blocks=200)
    for number in range(12):
        harness.add(f"r{number}", [number, 1, 2], 3 + number)
    seen: list[set[str]] = []
    while harness.core.has_work():
        harness.step()
        seen.append({request.request_id for request in harness.core.scheduler.lifecycle.running})
    first = seen[0]
    later = next(i for i, names in enumerate(seen) if names and not names <= first)
    assert all(names <= first for names in seen[:later]) and not (seen[later] & first)
