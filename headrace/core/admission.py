"""Whether one more request fits, looking ahead: memory is promised once.

Each running request will grow before it ends. With an estimate of every length, the peak of the sum over time is
known (LightLLM's past-future scheduler): sort by remaining tokens; when the i-th longest-lived request ends, those
before it still hold their blocks and all of them have grown by as many tokens as it had left.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.policy import Policy
from headrace.core.request import Request

_SMOOTHING = 0.05
_MARGIN = 0.1


class OutputLengthEstimator:
    """Learns how much of ``max_tokens`` answers really use, from those that finished."""

    def __init__(self) -> None:
        self._mean = 0.6
        self._deviation = 0.2

    def observe(self, request: Request) -> None:
        """Learn from a finished request."""
        used = request.num_output_tokens / request.max_tokens
        error = used - self._mean
        self._mean += _SMOOTHING * error
        self._deviation += _SMOOTHING * (abs(error) - self._deviation)

    def on_preemption(self) -> None:
        """The estimate was too low: be more careful."""
        self._mean = min(1.0, self._mean + _MARGIN)

    def remaining_tokens(self, request: Request) -> int:
        """Expected tokens still to be generated, at least one tenth of what it has generated already."""
        left = request.max_total_tokens - request.num_tokens
        share = min(1.0, self._mean + self._deviation)
        expected = max(
            share * request.max_tokens - request.num_output_tokens, _MARGIN * request.num_output_tokens
        )
        return min(left, int(expected) + 1)


class Admission:
    """Decides admissions against the peak of what is already promised.

    Args:
        blocks_per_token: blocks that one more token costs in the long run, over all KV groups that keep growing.
        num_blocks: all blocks there are.
    """

    def __init__(self, policy: Policy, blocks_per_token: float, num_blocks: int) -> None:
        self.estimator = OutputLengthEstimator()
        self._policy = policy
        self._blocks_per_token = blocks_per_token
        self._num_blocks = num_blocks

    def fits(self, candidates: list[Request], needed: int, running: Iterable[Request], held: int) -> bool:
        """True if the peak of ``running`` and ``candidates`` together stays within memory.

        Args:
            needed: blocks the candidates need for their known tokens, beyond what a cache holds for them.
            held: blocks that running requests hold, shared ones counted once.
        """
        per_token = self._blocks_per_token
        jobs: list[tuple[int, float]] = []
        base = float(held + needed)
        for request in running:
            jobs.append((self._remaining_tokens(request), self._own_blocks(request)))
            base += max(0, request.num_tokens - request.capacity_tokens) * per_token
        jobs += [(self._remaining_tokens(request), needed / len(candidates)) for request in candidates]
        jobs.sort()
        alive, peak = len(jobs), base
        for remaining, own in jobs:  # when the shortest-lived ends, all alive have grown by what it had left
            peak = max(peak, base + alive * remaining * per_token)
            base -= own
            alive -= 1
        return peak <= self._num_blocks

    def _remaining_tokens(self, request: Request) -> int:
        if self._policy.is_protected(request):
            return request.max_total_tokens - request.num_tokens
        return self.estimator.remaining_tokens(request)

    def _own_blocks(self, request: Request) -> float:
        return (request.num_tokens - request.num_cached_tokens) * self._blocks_per_token
