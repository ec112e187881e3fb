"""Who is served first, and who gives way when memory runs out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from headrace.core.request import Request

MAX_PREEMPTIONS = 2


class Policy:
    """An order of requests: "fcfs" by arrival, "priority" by (priority, arrival); a lower value is more urgent.

    "longest-prefix" changes only who starts next (``PrefixFirstQueue``); who gives way is told by arrival.

    A request preempted ``MAX_PREEMPTIONS`` times is protected: it is never a victim again, and it is resumed only when
    its whole remaining length fits.
    """

    def __init__(self, name: str) -> None:
        self.is_priority = name == "priority"
        self.is_prefix_first = name == "longest-prefix"

    def key(self, request: Request) -> tuple[int, int]:
        """Sort key; the smallest is served first."""
        return (request.priority if self.is_priority else 0, request.sequence)

    def is_protected(self, request: Request) -> bool:
        """True when the request may not be preempted again."""
        return request.timeline.num_preemptions >= MAX_PREEMPTIONS

    def victim(self, candidates: Iterable[Request], than: Request) -> Request | None:
        """The last in order of ``candidates`` that are unprotected and come after ``than``, or None."""
        floor = self.key(than)
        later = [r for r in candidates if self.key(r) > floor and not self.is_protected(r)]
        return max(later, key=self.key, default=None)


class WaitingQueue:
    """Waiting requests in policy order. Removal is lazy, so a cancel costs O(1)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, int], int, Request]] = []  # beams of one search have the same key
        self._num_pushed = 0
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._members, key=self._policy.key))

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def push(self, request: Request) -> None:
        """Add a request at its place in the order."""
        assert request not in self._members
        self._members.add(request)
        self._num_pushed += 1
        heapq.heappush(self._heap, (self._policy.key(request), self._num_pushed, request))

    def peek(self) -> Request | None:
        """The first request, or None."""
        while self._heap and self._heap[0][2] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._members.discard(request)
