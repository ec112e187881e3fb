"""The prefix cache: which blocks hold which tokens, and which requests keep them there."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.block_pool import BlockPool
from headrace.core.evictor import Evictor
from headrace.core.interfaces import CacheTier
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.prefix_match import PrefixMatch, first_block_needed, fit_windows
from headrace.core.radix_tree import TOKEN_BYTES, RadixNode, RadixTree


class RadixCache:
    """Shares the KV of prompts that start alike (RadixAttention of SGLang, cut at blocks, with KV groups).

    The tree holds one reference to each of its blocks. A request locks the path it uses, and no position of a locked
    path leaves. What nobody locks stays until the ``evictor`` needs its room.
    """

    def __init__(
        self, pool: BlockPool, specs: list[KVCacheSpec], block_size: int, tier: CacheTier | None = None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_groups = len(specs)
        self.windows = {g: spec.window for g, spec in enumerate(specs) if spec.window is not None}
        self.num_full_groups = len(specs) - len(self.windows)
        self.tree = RadixTree(block_size, len(specs), tuple(self.windows))
        self.evictor = Evictor(pool, self.tree, self.num_full_groups, tier)

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that eviction can take from the tree; some may have to wait for a step in flight.

        A block that a fork shares but has not committed yet counts once its parent is gone; evicting it wins nothing,
        but makes the count true again.
        """
        return self.evictor.num_unlocked * self.num_full_groups + len(self.evictor.idle)

    # ---- lookup ---------------------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: bytes, min_copy_tokens: int | None) -> PrefixMatch:
        """The longest usable prefix of ``tokens`` (uint32 bytes), which counts as used now.

        min_copy_tokens: least tokens worth copying from a block that matches in part; None: never copy.
        """
        tree = self.tree
        root = tree.roots.get(namespace)
        if root is None:
            return self.no_match()
        size = tree.block_bytes
        node, matched = tree.descend(root, tokens, len(tokens) - len(tokens) % size)
        source, num_partial = self._partial_source(node, tokens[matched : matched + size], min_copy_tokens)
        ids = self._touch_path(node)
        num_blocks = num_full = matched // size
        if self.windows:
            groups = [(ids[g], window) for g, window in self.windows.items()]
            num_full, num_partial = fit_windows(groups, num_blocks, num_partial, self.block_size)
            node = tree.ancestor_at(node, num_blocks - num_full)
        num_tokens = num_full * self.block_size + num_partial
        return PrefixMatch(
            num_tokens=num_tokens,
            num_full_blocks=num_full,
            block_ids=self._visible(ids, num_full, num_tokens) if self.windows else ids,
            partial=(source, num_partial) if num_partial else None,
            node=node,
            version=tree.version,
        )

    def no_match(self) -> PrefixMatch:
        """What a request without any cached token adopts."""
        return PrefixMatch(block_ids=[[] for _ in range(self.num_groups)], version=self.tree.version)

    def pinned_by(self, match: PrefixMatch) -> int:
        """Evictable blocks that adopting this match would keep from being evicted."""
        num_positions, node = 0, match.node
        while node is not None and node.parent is not None:
            if not node.num_locks:
                num_positions += node.num_blocks
            node = node.parent
        num_idle = sum(self.num_idle(match.block_ids[group]) for group in self.windows)
        return num_positions * self.num_full_groups + num_idle

    def num_idle(self, ids: Sequence[int]) -> int:
        """How many of these blocks are idle blocks of sliding groups."""
        return sum(block in self.evictor.idle for block in ids)

    # ---- holding --------------------------------------------------------------------------------------------

    def lock(self, node: RadixNode) -> None:
        """Keep the path from the root to ``node`` in the tree until ``unlock``."""
        step: RadixNode | None = node
        while step is not None:
            self._lock_one(step)
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one ``lock``; the path counts as used now."""
        time = self.tree.tick()
        while node.parent is not None:
            node.num_locks -= 1
            node.access_time = time
            if not node.num_locks:
                self.evictor.num_unlocked += node.num_blocks
                if not node.children:
                    self.evictor.tidy(node)
            node = node.parent
        node.num_locks -= 1
        self.tree.drop_if_bare(node)

    def acquire(self, ids: Sequence[int]) -> None:
        """Somebody beside the tree has taken a reference to these blocks (only sliding groups' blocks matter)."""
        idle = self.evictor.idle
        if idle:
            for block in ids:
                idle.pop(block, None)

    def release(self, ids: Sequence[int]) -> None:
        """Somebody beside the tree has given up a reference to these blocks (only sliding groups' blocks matter).

        The last one is the one that the fewest prefixes need, so it becomes the oldest.
        """
        ref_count, homes, idle = self.pool.ref_count, self.tree.homes, self.evictor.idle
        for block in reversed(ids):
            if block in homes and ref_count[block] == 1:
                idle[block] = self.tree.clock

    def pin(self, ids: list[int]) -> None:
        """Hold blocks (of any group) that a block copy of the step being scheduled reads."""
        pinned = self.evictor.pinned
        self.pool.incref(ids)
        self.acquire(ids)
        for block in ids:
            pinned[block] = pinned.get(block, 0) + 1

    def unpin(self, ids: list[int]) -> None:
        """Undo ``pin``: the step has taken the copies (and fences the blocks), or they are cancelled."""
        pinned = self.evictor.pinned
        for block in ids:
            pinned[block] -= 1
            if not pinned[block]:
                del pinned[block]
        self.pool.decref(ids)
        self.release(ids)

    def insert(self, node: RadixNode, tokens: bytes, blocks: list[list[int]]) -> RadixNode:
        """Continue the locked path that ends at ``node`` with whole blocks; the lock moves to the node returned.

        Where the tree has a position already it keeps its block, unless nobody else uses that (or it is gone): then
        it takes the request's, so that no duplicate stays. Otherwise the request keeps its own duplicate.
        """
        start = 0
        if node.children:
            node, start = self._follow(node, tokens, blocks)
            if start == len(tokens):
                return node
            tokens = tokens[start:]
            blocks = [ids[start // self.tree.block_bytes :] for ids in blocks]
        node = self.tree.append(node, tokens, blocks)
        for ids in blocks:
            self.pool.incref(ids)
        return node

    def num_same(self, node: RadixNode, blocks: list[list[int]]) -> int:
        """How many of these blocks, the last on the path to ``node``, are the tree's own before the first duplicate."""
        num_blocks = num_same = len(blocks[0])
        held: list[list[int]] = [[] for _ in blocks]
        while num_blocks > len(held[0]):
            assert node.parent is not None
            for group, ids in enumerate(node.blocks):
                held[group][:0] = ids[-(num_blocks - len(held[group])) :]
            node = node.parent
        for group, ids in enumerate(blocks):
            if group not in self.windows and held[group] != ids:
                different = (
                    i for i, pair in enumerate(zip(held[group], ids, strict=True)) if pair[0] != pair[1]
                )
                num_same = min(num_same, next(different))
        return num_same

    # ---- leaving --------------------------------------------------------------------------------------------

    def evict(self, num_free_wanted: int, num_spare: int = 0) -> None:
        """Evict until the pool has so many free blocks; see ``Evictor.evict``."""
        self.evictor.evict(num_free_wanted, num_spare)

    def release_transfer(self, ids: list[int]) -> None:
        """The tier is done with blocks that it took; -1 entries are skipped."""
        for block in ids:
            if block >= 0:
                self.evictor.in_transfer.remove(block)
        self.pool.decref(ids)

    def reset(self) -> bool:
        """Drop all that no request holds, without offering it to the tier. True if the tree is empty now."""
        for block in list(self.evictor.idle):
            self.evictor.drop(block)
        for node in reversed(list(self.tree.nodes())):
            if not node.num_locks:
                self.evictor.num_unlocked -= node.num_blocks
                for ids in self.tree.drop_tail(node, node.num_blocks):
                    self.pool.decref(ids)
        for root in list(self.tree.roots.values()):
            self.tree.drop_if_bare(root)
        return not any(root.children for root in self.tree.roots.values())

    # ---- inside ---------------------------------------------------------------------------------------------

    def _partial_source(
        self, node: RadixNode, tokens: bytes, min_copy_tokens: int | None
    ) -> tuple[list[int], int]:
        """(block of each group to copy from, tokens in common), or ([], 0)."""
        if not node.children or min_copy_tokens is None or len(tokens) < min_copy_tokens * TOKEN_BYTES:
            return [], 0
        child, common = self.tree.closest_child(node, tokens)
        if child is None or common < min_copy_tokens:
            return [], 0
        source = [ids[0] for ids in child.blocks]
        return ([], 0) if -1 in source else (source, common)

    def _touch_path(self, node: RadixNode) -> list[list[int]]:
        """Mark the path to ``node`` used; returns its blocks by group."""
        time, path = self.tree.tick(), []
        while node.parent is not None:
            node.access_time = time
            path.append(node)
            node = node.parent
        path.reverse()
        ids: list[list[int]] = []
        for group in range(self.num_groups):
            held: list[int] = []
            for step in path:
                held += step.blocks[group]
            ids.append(held)
        return ids

    def _visible(self, ids: list[list[int]], num_blocks: int, num_tokens: int) -> list[list[int]]:
        """The first ``num_blocks`` ids of each group, -1 before each window; idle ones count as used now."""
        idle, time = self.evictor.idle, self.tree.clock
        for held in ids:
            del held[num_blocks:]
        for group, window in self.windows.items():
            first = first_block_needed(num_tokens, window, self.block_size)
            held = ids[group]
            held[:first] = [-1] * first
            for block in reversed(held[first:]):
                if block in idle:
                    del idle[block]
                    idle[block] = time
        return ids

    def _follow(self, node: RadixNode, tokens: bytes, blocks: list[list[int]]) -> tuple[RadixNode, int]:
        """Lock the part of ``tokens`` that the tree has below ``node``: (its end, bytes of it)."""
        tree, size = self.tree, self.tree.block_bytes
        start = 0
        while start < len(tokens):
            child = node.children.get(tokens[start : start + size])
            if child is None:
                break
            common = tree.common_blocks(child, tokens, start, len(tokens))
            node = child if common == child.num_blocks else tree.split(child, common)
            self._lock_one(node)
            first = start // size
            for group, own in enumerate(blocks):
                self._take_over(node, group, own[first : first + common])
            start += common * size
        return node, start

    def _lock_one(self, node: RadixNode) -> None:
        if not node.num_locks:
            self.evictor.num_unlocked -= node.num_blocks
        node.num_locks += 1

    def _take_over(self, node: RadixNode, group: int, own: list[int]) -> None:
        """Replace blocks of ``node`` that nobody else uses by the request's own of the same content."""
        held, pool = node.blocks[group], self.pool
        if held == own:
            return
        for index, (old, new) in enumerate(zip(held, own, strict=True)):
            if new < 0 or new == old or (old >= 0 and pool.ref_count[old] > 1):
                continue
            pool.incref((new,))
            self.tree.replace_block(node, group, index, new)
            self.evictor.idle.pop(old, None)
            pool.decref((old,))
