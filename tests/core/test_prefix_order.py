"""What is cached starts first, and nobody starves."""

from __future__ import annotations

import random

from headrace.core.policy import Policy
from headrace.core.prefix_order import MAX_OVERTAKEN, RANKED_PEEKS, PrefixFirstQueue
from headrace.core.request import Request, RequestStatus
from headrace.sampling_params import SamplingParams
from tests.engine.core_harness import CoreHarness


def make(sequence: int) -> Request:
    request = Request(f"r{sequence}", [1, 2, 3], SamplingParams(), max_tokens=4)
    request.sequence = sequence
    return request


def make_queue(cached: dict[int, int]) -> PrefixFirstQueue:
    return PrefixFirstQueue(Policy("longest-prefix"), lambda request: cached.get(request.sequence, 0))


def test_the_longest_cached_prefix_is_first_then_arrival() -> None:
    queue = make_queue({2: 30, 4: 50, 1: 30})
    for sequence in range(6):
        queue.push(make(sequence))
    order = []
    while (request := queue.peek()) is not None:
        order.append(request.sequence)
        queue.remove(request)
    assert order == [4, 1, 2, 0, 3, 5]
    assert len(queue) == 0 and list(queue) == []


def test_what_becomes_cached_moves_up_within_some_looks() -> None:
    cached: dict[int, int] = {}
    queue = make_queue(cached)
    requests = [make(sequence) for sequence in range(3)]
    for request in requests:
        queue.push(request)
    assert queue.peek() is requests[0]
    cached[2] = 16
    assert requests[2] in [queue.peek() for _ in range(RANKED_PEEKS + 1)]


def test_an_overtaken_request_goes_first_in_the_end_and_a_preempted_one_at_once() -> None:
    queue = make_queue(dict.fromkeys(range(1, 1000), 100))
    first = make(0)
    queue.push(first)
    overtaken = 0
    for sequence in range(1, 9):
        queue.push(make(sequence))
    for sequence in range(9, 1000):  # there is always a later one with a longer prefix
        queue.push(make(sequence))
        head = queue.peek()
        assert head is not None
        queue.remove(head)
        if head is first:
            break
        overtaken += 1
    assert MAX_OVERTAKEN <= overtaken <= MAX_OVERTAKEN + RANKED_PEEKS
    back = make(5000)
    back.status = RequestStatus.PREEMPTED
    for request in (make(4000), back):
        queue.push(request)
    assert back in [queue.peek() for _ in range(RANKED_PEEKS + 2)]


def test_interleaved_prefixes_are_computed_once_each() -> None:
    """Four beginnings in turn, and memory for little more than one of them."""
    rng = random.Random(0)
    beginnings = [[rng.randrange(50) for _ in range(80)] for _ in range(4)]
    computed = {}
    for policy in ("fcfs", "longest-prefix"):
        harness = CoreHarness(num_blocks=40, max_num_seqs=1, max_num_batched_tokens=64, policy=policy)
        for number in range(40):
            harness.add(f"r{number}", [*beginnings[number % 4], number, 1], 2)
        harness.run()
        harness.check_answers()
        computed[policy] = harness.core.stats().num_computed_tokens
    assert computed["longest-prefix"] < 4 * 80 + 40 * 12
    assert computed["fcfs"] > 30 * 80


def test_random_traffic_is_answered_in_every_order() -> None:
    rng = random.Random(1)
    harness = CoreHarness(num_blocks=50, max_num_batched_tokens=64, policy="longest-prefix", lag=1)
    shared = [rng.randrange(50) for _ in range(60)]
    for number in range(80):
        harness.add(
            f"r{number}",
            [*shared[: rng.randrange(61)], number % 50],
            rng.randrange(1, 12),
            n=rng.choice([1, 2]),
        )
        if rng.random() < 0.3:
            harness.step()
        if rng.random() < 0.1:
            harness.core.abort_requests([f"r{rng.randrange(number + 1)}"])
    harness.run()
