"""Who leaves the prefix cache next: least recently used leaves, and sliding blocks that only the tree holds."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count, islice

from headrace.core.radix_tree import RadixNode


class LeafQueue:
    """Unlocked leaves by access time, as a lazy heap: each node has at most one entry, corrected when it surfaces."""

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

    def __contains__(self, node: RadixNode) -> bool:
        return any(entry[2] is node for entry in self._heap)


class IdleBlocks:
    """Blocks of sliding groups that only the tree holds, least recently used first: {block: access time}.

    They may be evicted one by one, wherever in the tree they are.
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, block: int) -> bool:
        return block in self._times

    def add(self, block: int, time: int) -> None:
        """Enter a block, or renew its time."""
        self._times.pop(block, None)
        self._times[block] = time

    def discard(self, block: int) -> None:
        """Take a block out, if it is in."""
        self._times.pop(block, None)

    def first(self, number: int) -> Iterator[tuple[int, int]]:
        """(block, time) of the least recently used ones."""
        return islice(self._times.items(), number)

    def blocks(self) -> list[int]:
        """All of them, oldest first."""
        return list(self._times)
