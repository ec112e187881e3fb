"""The seams that later features plug into, each driven by a small fake through the real engine core."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from headrace.core.interfaces import Advance
from headrace.core.output import EngineCoreRequest, SchedulerOutput
from headrace.core.request import Request
from headrace.core.token_mask import TokenMask
from headrace.errors import GrammarError
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import Constraint
from tests.engine.core_harness import VOCAB, Answer, CoreHarness, next_token

PROMPT = list(range(1, 23))


class HostTier:
    """A cache tier that keeps evicted blocks' content on the "host" and brings it back some polls later."""

    def __init__(self, delay: int, keeps_blocks: bool, fails: bool = False) -> None:
        self.harness: CoreHarness | None = None
        self.delay, self.keeps_blocks, self.fails = delay, keeps_blocks, fails
        self.store: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        self.loading: list[list[Any]] = []
        self.leaving: list[list[int]] = []
        self.num_loaded_tokens = 0

    @property
    def content(self) -> np.ndarray:
        assert self.harness is not None
        return self.harness.executor._cache._content

    def on_evict(self, namespace: str, prefix: bytes, block_ids: list[int]) -> bool:
        token_ids = list(memoryview(prefix).cast("I"))
        self.store[(namespace, tuple(token_ids))] = self.content[block_ids[0]].copy()
        if self.keeps_blocks:
            self.leaving.append(block_ids)
        return self.keeps_blocks

    def match(self, request: Request, num_cached_tokens: int) -> tuple[int, bool]:
        end = num_cached_tokens // 4 * 4
        tokens = request.token_ids
        while end + 4 <= len(tokens) and (request.namespace, tuple(tokens[: end + 4])) in self.store:
            end += 4
        return max(0, end - num_cached_tokens), self.delay > 0

    def start_load(self, request: Request, first_token: int, num_tokens: int) -> None:
        self.loading.append([self.delay, request, first_token, num_tokens])

    def poll_loaded(self) -> list[tuple[str, int]]:
        done = []
        for entry in list(self.loading):
            entry[0] -= 1
            if entry[0] <= 0:
                self.loading.remove(entry)
                done.append((entry[1].request_id, 0 if self.fails else self._bring(*entry[1:])))
        return done

    def _bring(self, request: Request, first: int, count: int) -> int:
        for position in range(first, first + count if request.block_table else first):
            source = self.store[(request.namespace, tuple(request.token_ids[: position // 4 * 4 + 4]))]
            self.content[request.block_table[0][position // 4], position % 4] = source[position % 4]
        self.num_loaded_tokens += count
        return count

    def release_some(self) -> None:
        assert self.harness is not None
        while self.leaving:
            self.harness.kv.release_transfer(self.leaving.pop())


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("keeps_blocks", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_blocks_go_to_a_tier_and_come_back(delay: int, keeps_blocks: bool, fails: bool) -> None:
    tier = HostTier(delay, keeps_blocks, fails)
    harness = CoreHarness(num_blocks=24, tier=tier, lag=1, max_steps_outstanding=2)
    tier.harness = harness
    rng = random.Random(delay)
    documents = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(4)]
    for number in range(40):
        harness.add(f"r{number}", documents[number % 4] + [rng.randrange(VOCAB)], rng.randint(2, 8))
        for _ in range(rng.randint(1, 6)):
            harness.step()
            tier.release_some()
        if number % 7 == 0:
            harness.core.abort_requests([f"r{number}"])
    while harness.core.has_work():
        harness.step()
        tier.release_some()
    tier.release_some()
    harness.run()
    harness.check_answers()
    assert tier.store and (tier.num_loaded_tokens > 0) is not fails


class EvenTokens:
    """A grammar of even tokens; it is "compiled" two steps after it was asked for. Remembers what it accepted."""

    def __init__(self) -> None:
        self.waiting: dict[Request, int] = {}
        self.accepted: dict[str, list[int]] = {}
        self.released: list[str] = []
        self.num_prefetched = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.accepted

    def start(self, request: Request, constraint: Constraint) -> None:
        self.waiting[request] = 2

    def is_ready(self, request: Request) -> bool:
        return request not in self.waiting

    def take_ready(self) -> list[tuple[Request, Advance]]:
        self.waiting = {request: count - 1 for request, count in self.waiting.items()}
        ready = [request for request, count in self.waiting.items() if count < 0]
        for request in ready:
            del self.waiting[request]
            self.accepted[request.request_id] = []
        return [(request, Advance()) for request in ready]

    def take_failures(self) -> list[tuple[Request, GrammarError]]:
        return []

    def wait_prepared(self) -> None:
        pass

    def awaits_results(self, scheduler_output: SchedulerOutput) -> bool:
        return any(scheduler_output.request_ids[i] in self.accepted for i in scheduler_output.sampled)

    def fill(self, scheduler_output: SchedulerOutput) -> TokenMask | None:
        ids = [scheduler_output.request_ids[i] for i in scheduler_output.sampled]
        rows = np.array([row for row, name in enumerate(ids) if name in self.accepted], np.int64)
        if not len(rows):
            return None
        return TokenMask(rows, np.full((len(rows), -(-VOCAB // 32)), 0x55555555, np.uint32))

    def accept(self, request: Request, token_ids: list[int]) -> Advance | None:
        if request.request_id not in self.accepted:
            return None
        self.accepted[request.request_id] += token_ids
        return Advance()

    def prefetch(self) -> None:
        self.num_prefetched += 1

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("steps_outstanding", [1, 2, 3, 4])
def test_masks_are_filled_between_the_two_calls_and_follow_committed_tokens(steps_outstanding: int) -> None:
    grammar = EvenTokens()
    harness = CoreHarness(lag=1, max_steps_outstanding=steps_outstanding, mask_source=grammar)
    harness.add("even", PROMPT, 9, constraint=Constraint("regex", "even"))
    harness.add("free", PROMPT[:9], 9)
    harness.run()
    assert all(token % 2 == 0 for token in harness.answers[("even", 0)].token_ids)
    assert any(token % 2 for token in harness.answers[("free", 0)].token_ids)
    assert grammar.accepted == {"even": harness.answers[("even", 0)].token_ids}
    assert sorted(set(grammar.released)) == ["even", "free"] and grammar.num_prefetched


def add_group(harness: CoreHarness, group: str, size: int, max_tokens: int) -> list[Request]:
    """Requests of one co-schedule group, as a beam search would make them."""
    members = []
    for index in range(size):
        name, params = f"{group}{index}", SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        core_request = EngineCoreRequest(name, [*PROMPT[:6], index], params, max_tokens)
        harness.core.add_request(core_request)
        harness.requests[name] = core_request
        harness.answers[(name, 0)] = Answer()
        member = harness.core._families[name][0]
        member.group_id = group
        members.append(member)
    return members


def test_a_co_schedule_group_runs_and_is_preempted_together() -> None:
    harness = CoreHarness(num_blocks=18, max_num_batched_tokens=64)
    harness.add("first", PROMPT[:8], 40, ignore_eos=True)
    members = add_group(harness, "beam", 3, 12)
    was_preempted = False
    while harness.core.has_work():
        harness.step()
        alive = [member for member in members if not member.is_finished]
        assert len({member.num_output_tokens for member in alive}) <= 1
        assert len({member.status for member in alive}) <= 1 or not was_preempted
        was_preempted = was_preempted or any(member.timeline.num_preemptions for member in members)
    harness.check_answers()
    assert was_preempted
    assert len({member.timeline.num_preemptions for member in members}) == 1


def test_tokens_appended_on_the_host_are_computed_as_one_chunk() -> None:
    harness = CoreHarness(lag=1, max_steps_outstanding=2)
    harness.add("forced", PROMPT, 30, bad_word_ids=[[90, 91]], ignore_eos=True)
    harness.add("other", PROMPT[:9], 12)
    request = harness.core._families["forced"][0]
    while request.num_output_tokens < 4:
        harness.step()
    harness.core._max_outstanding = 0  # only take in what is in flight
    while request.num_steps_in_flight:
        harness.step()
    harness.core._max_outstanding = 2
    known = list(request.token_ids)
    harness.core.scheduler.lifecycle.append_tokens(request, [5, 6, 7])
    computed = harness.core.scheduler.num_computed_tokens
    harness.core.scheduler.check_integrity()
    while len(request.token_ids) < len(known) + 4:
        harness.step()
    assert request.token_ids[: len(known) + 3] == [*known, 5, 6, 7]
    assert request.token_ids[len(known) + 3] == next_token([*known, 5, 6, 7], 0)
    assert harness.core.scheduler.num_computed_tokens - computed >= 4
    harness.core.abort_requests(["forced"])
    harness.run()
