"""Who leaves the prefix cache next, and where it goes."""

from __future__ import annotations

from headrace.core.block_pool import BlockPool
from headrace.core.interfaces import CacheTier
from headrace.core.leaf_queue import LeafQueue
from headrace.core.radix_tree import RadixNode, RadixTree

MAX_PASSED_OVER = 16  # leaves or blocks in use by steps in flight that one search looks past
MAX_REMEMBERED = 4096  # prefixes that left, for explaining misses
FOREVER = 1 << 62


class Evictor:
    """Takes blocks out of the tree, least recently used first.

    The least recently used unlocked leaf loses its last position (its block in every group), so that order is exact
    for each block. Blocks of sliding groups that only the tree holds ("idle") may also leave alone, from anywhere.

    idle: {idle block: access time}, oldest first.
    pinned: {block: number of copies of the step being scheduled that read it}.
    in_transfer: blocks that the tier took and has not released.
    loading: blocks of requests that the tier fills, also after their request is gone.
    num_unlocked: positions (blocks a group) of nodes without locks.
    """

    def __init__(
        self, pool: BlockPool, tree: RadixTree, num_full_groups: int, tier: CacheTier | None = None
    ) -> None:
        self.leaves = LeafQueue()
        self.idle: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.in_transfer: set[int] = set()
        self.loading: set[int] = set()
        self.num_unlocked = 0
        self._gone: dict[int, None] = {}  # hashes of prefixes that left, oldest first
        self.num_evicted_blocks = 0
        self._pool = pool
        self._tree = tree
        self._num_full_groups = num_full_groups
        self._tier = tier

    def evict(self, num_free_wanted: int, num_spare: int = 0) -> None:
        """Evict until the pool has so many free blocks, counting those that the tier took and will release.

        Blocks that a step in flight may read would be fenced, not free, so they are passed over at first. If the
        others do not suffice they go too, and fewer blocks are free until the step has completed.

        num_spare: further blocks to free if they are at hand, since many at a time cost little more than one.
        """
        self._evict(num_free_wanted + num_spare, fenced_too=False)
        if self._pool.num_free + len(self.in_transfer) < num_free_wanted:
            self._evict(num_free_wanted, fenced_too=True)

    def tidy(self, node: RadixNode) -> None:
        """``node`` may have become an unlocked leaf, or lost blocks: queue it; forget what of it holds no block."""
        while node.parent is not None and not node.children and not node.num_locks:
            if self._num_full_groups:
                self.leaves.push(node)
                return
            num_bare = 0
            for position in zip(*map(reversed, node.blocks), strict=True):
                if any(block >= 0 for block in position):
                    break
                num_bare += 1
            if not num_bare:
                return
            parent = node.parent
            self._tree.drop_tail(node, num_bare)
            self.num_unlocked -= num_bare
            if node.tokens:
                return
            node = parent
        if node.parent is None:
            self._tree.drop_if_bare(node)

    def drop(self, block: int) -> None:
        """Take an idle block out of the tree without offering it to the tier."""
        node, group = self._tree.homes[block]
        self._tree.replace_block(node, group, node.blocks[group].index(block), -1)
        del self.idle[block]
        self._pool.decref((block,))

    def _evict(self, num_free_wanted: int, fenced_too: bool) -> None:
        pool, leaves = self._pool, self.leaves
        passed_over: list[RadixNode] = []
        while True:
            missing = num_free_wanted - pool.num_free - len(self.in_transfer)
            if fenced_too:
                missing -= pool.num_fenced
            if missing <= 0:
                break
            leaf = leaves.oldest() if self._num_full_groups and len(passed_over) < MAX_PASSED_OVER else None
            before = leaf.access_time if leaf is not None else FOREVER
            if self.idle and self._evict_idle(missing, before, fenced_too):
                continue
            if leaf is None:
                break
            if not self._evict_tail(leaf, missing, fenced_too):
                passed_over.append(leaves.pop())
        for leaf in passed_over:
            leaves.push(leaf)

    def _evict_tail(self, leaf: RadixNode, missing: int, fenced_too: bool) -> bool:
        """Evict positions from the end of a leaf, at most as many as surely win no more than ``missing`` blocks (or
        one); False if none may go."""
        num_positions = self._num_movable(leaf, -(-missing // len(leaf.blocks)), fenced_too)
        if not num_positions:
            return False
        parent = leaf.parent
        namespace, path = self._tree.path_tokens(leaf)
        size = self._tree.block_bytes
        self._remember(namespace, path[: len(path) - (num_positions - 1) * size])
        if self._tier is not None:
            for place in range(-1, -1 - num_positions, -1):
                prefix = path[: len(path) + (place + 1) * size]
                self._offer(namespace, prefix, [ids[place] for ids in leaf.blocks])
        for ids in self._tree.drop_tail(leaf, num_positions):
            self._part_with(ids)
        self.num_unlocked -= num_positions
        if not leaf.tokens and parent is not None:
            self.tidy(parent)
        return True

    def was_evicted(self, namespace: str, prefix: bytes) -> bool:
        """Whether the last block of ``prefix`` was cached and has left not long ago."""
        return hash((namespace, prefix)) in self._gone

    def _remember(self, namespace: str, prefix: bytes) -> None:
        """The last block of ``prefix`` leaves: whoever matches up to there can be told."""
        self._gone[hash((namespace, prefix))] = None
        if len(self._gone) > MAX_REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def _num_movable(self, leaf: RadixNode, num_positions: int, fenced_too: bool) -> int:
        """How many of the last ``num_positions`` of a leaf may go now."""
        last_read_step, fence, pinned = self._pool.last_read_step, self._pool.completed_step_id, self.pinned
        for ids in leaf.blocks:
            num_movable = 0
            for block in reversed(ids[-num_positions:]):
                if block in pinned or (not fenced_too and block >= 0 and last_read_step[block] > fence):
                    break
                num_movable += 1
            num_positions = num_movable
            if not num_movable:
                break
        return num_positions

    def _evict_idle(self, missing: int, before: int, fenced_too: bool) -> bool:
        """Evict idle blocks used earlier than ``before``, at most ``missing``; False if none may go."""
        victims: list[int] = []
        num_passed_over = 0
        for block, time in self.idle.items():
            if time >= before or len(victims) == missing or num_passed_over == MAX_PASSED_OVER:
                break
            if fenced_too or not self._pool.is_fenced(block):
                victims.append(block)
            else:
                num_passed_over += 1
        for block in victims:
            node, group = self._tree.homes[block]
            index = node.blocks[group].index(block)
            if self._tier is not None:
                namespace, path = self._tree.path_tokens(node)
                prefix = path[: len(path) - (node.num_blocks - 1 - index) * self._tree.block_bytes]
                position = [block if g == group else -1 for g in range(self._tree.num_groups)]
                self._offer(namespace, prefix, position)
            self._tree.replace_block(node, group, index, -1)
            if not self._num_full_groups:
                self.tidy(node)
        self._part_with(victims)
        return bool(victims)

    def _offer(self, namespace: str, prefix: bytes, position: list[int]) -> None:
        """Offer the tier those blocks of the last position of ``prefix`` that only the tree holds; what it takes gets a
        reference."""
        assert self._tier is not None
        ref_count = self._pool.ref_count
        sole = [block if block >= 0 and ref_count[block] == 1 else -1 for block in position]
        if max(sole) >= 0 and self._tier.on_evict(namespace, prefix, sole):
            self._pool.incref(sole)
            self.in_transfer.update(block for block in sole if block >= 0)

    def _part_with(self, ids: list[int]) -> None:
        """The tree gives up its references to blocks that have left it."""
        self.num_evicted_blocks += len(ids) - ids.count(-1)
        if self.idle:
            for block in ids:
                self.idle.pop(block, None)
        self._pool.decref(ids)
