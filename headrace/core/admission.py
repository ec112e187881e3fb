"""Whether one more request fits, looking ahead: memory is promised once.

Each running request will grow before it ends. With an estimate of every length, the peak of the sum over time is
known (LightLLM's past-future scheduler): sort by remaining tokens; when the i-th longest-lived request ends, those
before it still hold their blocks and all of them have grown by as many tokens as it had left.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.kv_cache_manager import KVCacheManager
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
        return self.remaining_of((request,))[0]

    def remaining_of(self, requests: Iterable[Request]) -> list[int]:
        """``remaining_tokens`` of each, in half the time."""
        share = min(1.0, self._mean + self._deviation)
        expected = []
        for request in requests:
            num_tokens = len(request.token_ids)
            num_outputs = num_tokens - request.num_prompt_tokens
            tokens = share * request.max_tokens - num_outputs
            if tokens < _MARGIN * num_outputs:
                tokens = _MARGIN * num_outputs
            left = request.max_total_tokens - num_tokens
            expected.append(left if left <= tokens else int(tokens) + 1)
        return expected


class Admission:
    """Decides admissions against the peak of what is already promised.

    Args:
        max_step_tokens: tokens of one request that may be computed but not committed, which a sliding group holds
            beside its window.
    """

    def __init__(self, policy: Policy, kv: KVCacheManager, max_step_tokens: int) -> None:
        self.estimator = OutputLengthEstimator()
        self._policy = policy
        self._kv = kv
        growing = sum(spec.window is None for spec in kv.specs)
        self._blocks_per_token = growing / kv.block_size
        self._sliding_limits = [
            -(-(spec.window + max_step_tokens) // kv.block_size) + 1
            for spec in kv.specs
            if spec.window is not None
        ]

    def fits(self, candidate: Request, num_cached_blocks: int, running: Iterable[Request]) -> bool:
        """True if the peak of ``running`` and the candidate together stays within memory.

        Args:
            num_cached_blocks: blocks of the candidate's known tokens, over all groups, that others hold anyhow.
        """
        kv, per_token = self._kv, self._blocks_per_token
        needed = self.blocks_of(candidate.num_tokens) - num_cached_blocks
        base = float(kv.num_blocks - kv.num_usable_blocks - kv.num_fenced_blocks + needed)
        jobs = [(self._remaining_tokens(candidate), float(needed))]
        for request in running:
            jobs.append((self._remaining_tokens(request), self._own_blocks(request)))
            base += max(0, request.num_tokens - request.capacity_tokens) * per_token
        jobs.sort()
        alive, peak = len(jobs), base
        for remaining, own in jobs:  # when the shortest-lived ends, all alive have grown by what it had left
            peak = max(peak, base + alive * remaining * per_token)
            base -= own
            alive -= 1
        return peak <= kv.num_blocks

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks, over all groups, that a request of so many tokens holds."""
        num_blocks = -(-num_tokens // self._kv.block_size)
        sliding = sum(min(num_blocks, limit) for limit in self._sliding_limits)
        return sliding + num_blocks * (len(self._kv.specs) - len(self._sliding_limits))

    def _remaining_tokens(self, request: Request) -> int:
        if self._policy.is_protected(request):
            return request.max_total_tokens - request.num_tokens
        return self.estimator.remaining_tokens(request)

    def _own_blocks(self, request: Request) -> float:
        return (request.num_tokens - request.num_cached_tokens) * self._blocks_per_token
