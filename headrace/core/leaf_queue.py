"""Leaves of the radix tree in the order in which they may be evicted."""

from __future__ import annotations

import heapq
from itertools import count

from headrace.core.radix_tree import RadixNode


class LeafQueue:
    """Unlocked leaves by access time, as a lazy heap: a node has at most one entry, put right when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RadixNode]] = []
        self._serial = count()

    def push(self, node: RadixNode) -> None:
        """Enter a node that has become an unlocked leaf; no effect if it is in the queue already."""
        if not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._heap, (node.access_time, next(self._serial), node))

    def oldest(self) -> RadixNode | None:
        """The least recently used leaf, left in the queue; None if there is none."""
        heap = self._heap
        while heap:
            time, _, node = heap[0]
            if node.num_locks or node.children or not node.tokens:
                heapq.heappop(heap)
                node.is_queued = False
            elif time < node.access_time:
                heapq.heapreplace(heap, (node.access_time, next(self._serial), node))
            else:
                return node
        return None

    def pop(self) -> RadixNode:
        """Take out what ``oldest`` returned."""
        node = heapq.heappop(self._heap)[2]
        node.is_queued = False
        return node
