"""Admission against the peak of what is promised, checked by simulation."""

from __future__ import annotations

import random

from headrace.core.admission import Admission, OutputLengthEstimator
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.policy import MAX_PREEMPTIONS, Policy
from headrace.core.request import Request
from headrace.sampling_params import SamplingParams


def make(num_prompt: int, num_output: int, max_tokens: int) -> Request:
    request = Request("r", list(range(num_prompt)), SamplingParams(), max_tokens=max_tokens)
    request.token_ids += [0] * num_output
    request.timeline.num_preemptions = MAX_PREEMPTIONS  # protected: its whole length counts, no estimate
    return request


def simulated_peak(requests: list[Request]) -> int:
    """Tokens held over time when each request grows one token a step until its end."""
    lengths = [request.num_tokens for request in requests]
    ends = [request.max_total_tokens for request in requests]
    peak = 0
    while True:
        alive = [i for i in range(len(lengths)) if lengths[i] <= ends[i]]
        if not alive:
            return peak
        peak = max(peak, sum(lengths[i] for i in alive))
        for i in alive:
            lengths[i] += 1


def test_accepts_exactly_what_the_simulated_peak_allows() -> None:
    rng = random.Random(0)
    for _ in range(200):
        requests = [
            make(rng.randint(1, 60), rng.randint(0, 20), rng.randint(21, 80))
            for _ in range(rng.randint(2, 9))
        ]
        running, candidate = requests[:-1], requests[-1]
        peak = simulated_peak(requests)
        for num_blocks, expected in ((peak, True), (peak - 1, False)):
            kv = KVCacheManager([KVCacheSpec("full", (0,), 1)], num_blocks, 1, enable_prefix_caching=False)
            for request in running:
                assert kv.admit(request, None, request.num_tokens, step_id=1)
            admission = Admission(Policy("fcfs"), kv, 1)
            assert admission.fits(candidate, 0, running) is expected
            for request in running:
                kv.free(request)


def test_estimator_learns_how_long_answers_are() -> None:
    estimator, rng = OutputLengthEstimator(), random.Random(0)
    for _ in range(500):
        estimator.observe(make(10, rng.randint(20, 40), 300))
    fresh = make(10, 0, 300)
    assert 25 <= estimator.remaining_tokens(fresh) <= 75
    for _ in range(500):
        estimator.observe(make(10, 300, 300))
    assert estimator.remaining_tokens(fresh) >= 290


def test_estimate_never_passes_the_limit_and_never_reaches_zero() -> None:
    estimator = OutputLengthEstimator()
    nearly_done = make(10, 299, 300)
    assert estimator.remaining_tokens(nearly_done) == 1
