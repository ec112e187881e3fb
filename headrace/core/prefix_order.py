"""Waiting requests, those with the longest cached prefix first: what is in the cache is used before it is evicted.

Served in this order a batch of requests computes each common beginning about once, as a depth-first walk of its prefix
tree would (SGLang's longest-prefix-match scheduling). Nobody starves: a request that so many later ones have overtaken
goes before all that have not waited so long, and one that was preempted before everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from headrace.core.policy import Policy, WaitingQueue
from headrace.core.request import Request, RequestStatus

MAX_OVERTAKEN = 256
"""Later requests that may go before one."""

WINDOW = 256
"""Waiting requests, in order of arrival, that are looked at; it bounds the cost of ranking."""

RANKED_PEEKS = 2
"""An order serves for so many looks at the queue although the cache and the queue have changed."""


class PrefixFirstQueue(WaitingQueue):
    """See ``WaitingQueue``; the first is the one with the most cached tokens among the ``WINDOW`` oldest.

    Args:
        cached_tokens: how much of a request's prompt is in the cache now.
    """

    def __init__(self, policy: Policy, cached_tokens: Callable[[Request], int]) -> None:
        super().__init__(policy)
        self._cached_tokens = cached_tokens
        self._arrived: dict[
            Request, int
        ] = {}  # in order of arrival, but for those that come back; -> overtaken by
        self._ranked: list[Request] = []  # the best last
        self._first: Request | None = None
        self._num_peeks = 0

    def __iter__(self) -> Iterator[Request]:
        return iter(self._arrived)

    def push(self, request: Request) -> None:
        """Add a request."""
        super().push(request)
        self._arrived[request] = 0
        self._num_peeks = min(self._num_peeks, RANKED_PEEKS)

    def peek(self) -> Request | None:
        """The request to start next, or None."""
        self._num_peeks += 1
        while self._ranked and self._ranked[-1] not in self._members:
            self._ranked.pop()
        if not self._ranked or self._num_peeks > RANKED_PEEKS:
            self._rank()
        self._first = self._ranked[-1] if self._ranked else None
        return self._first

    def remove(self, request: Request) -> None:
        """Take a request out; if it was the first, it has overtaken all that came before it."""
        super().remove(request)
        self._arrived.pop(request, None)
        if request is self._first:
            self._first = None
            for other in islice(self._arrived, WINDOW):
                if other.sequence < request.sequence:
                    self._arrived[other] += 1

    def _rank(self) -> None:
        self._num_peeks = 0
        self._ranked = sorted(islice(self._arrived, WINDOW), key=self._rank_of, reverse=True)

    def _rank_of(self, request: Request) -> tuple[int, int, int]:
        if request.status is RequestStatus.PREEMPTED:
            return (0, 0, request.sequence)
        if self._arrived[request] >= MAX_OVERTAKEN:
            return (1, 0, request.sequence)
        return (2, -self._cached_tokens(request), request.sequence)
