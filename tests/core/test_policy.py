"""Order of requests, and who gives way."""

from __future__ import annotations

import random

from headrace.core.policy import MAX_PREEMPTIONS, Policy, WaitingQueue
from headrace.core.request import Request
from headrace.sampling_params import SamplingParams


def make(sequence: int, priority: int = 0) -> Request:
    request = Request(f"r{sequence}", [1, 2, 3], SamplingParams(), max_tokens=4, priority=priority)
    request.sequence = sequence
    return request


def test_fcfs_ignores_priority_and_keeps_arrival_order() -> None:
    queue = WaitingQueue(Policy("fcfs"))
    requests = [make(0, priority=5), make(1), make(2, priority=-3)]
    for request in reversed(requests):
        queue.push(request)
    assert list(queue) == requests
    assert queue.peek() is requests[0]


def test_priority_orders_by_value_then_arrival() -> None:
    queue = WaitingQueue(Policy("priority"))
    late_urgent, early, late = make(9, priority=-1), make(1), make(2)
    for request in (late, early, late_urgent):
        queue.push(request)
    assert list(queue) == [late_urgent, early, late]


def test_removal_anywhere_and_pushing_again() -> None:
    rng, queue = random.Random(0), WaitingQueue(Policy("fcfs"))
    requests = [make(i) for i in range(50)]
    inside: set[Request] = set()
    for _ in range(2000):
        request = rng.choice(requests)
        if request in inside:
            queue.remove(request)
            inside.discard(request)
        else:
            queue.push(request)
            inside.add(request)
        assert len(queue) == len(inside)
        assert queue.peek() is (min(inside, key=lambda r: r.sequence) if inside else None)


def test_victim_is_the_last_unprotected_after_the_asker() -> None:
    policy = Policy("fcfs")
    requests = [make(i) for i in range(4)]
    assert policy.victim(requests, than=requests[1]) is requests[3]
    requests[3].timeline.num_preemptions = MAX_PREEMPTIONS
    assert policy.victim(requests, than=requests[1]) is requests[2]
    assert policy.victim(requests, than=requests[3]) is None
