"""Leaves come out by last use, whatever happened to them while they were queued."""

from __future__ import annotations

import random

from headrace.core.leaf_queue import LeafQueue
from headrace.core.radix_tree import RadixNode


def leaf(time: int, tokens: bytes = b"abcd") -> RadixNode:
    return RadixNode(None, tokens, [[1]], time, 0)


def test_entries_are_put_right_when_they_surface() -> None:
    queue = LeafQueue()
    used, locked, grown, emptied, plain = leaf(1), leaf(2), leaf(3), leaf(4), leaf(5)
    for node in (plain, emptied, grown, locked, used):
        queue.push(node)
    used.access_time = 9
    locked.num_locks = 1
    grown.children[b"x"] = plain
    emptied.tokens.clear()
    assert queue.oldest() is plain and queue.pop() is plain
    assert queue.oldest() is used and queue.pop() is used
    assert queue.oldest() is None
    assert not any(node.is_queued for node in (used, locked, grown, emptied, plain))


def test_a_node_has_one_entry() -> None:
    queue, node = LeafQueue(), leaf(1)
    queue.push(node)
    queue.push(node)
    assert queue.oldest() is node and queue.pop() is node and queue.oldest() is None
    queue.push(node)
    assert queue.oldest() is node


def test_random_uses_come_out_in_order() -> None:
    rng, queue = random.Random(0), LeafQueue()
    nodes = [leaf(time) for time in range(50)]
    for node in rng.sample(nodes, 50):
        queue.push(node)
    for time in range(100, 200):
        rng.choice(nodes).access_time = time
    order = []
    while queue.oldest() is not None:
        order.append(queue.pop())
    assert order == sorted(nodes, key=lambda node: node.access_time)
