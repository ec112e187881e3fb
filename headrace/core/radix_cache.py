"""The prefix cache: the radix tree, the blocks it holds, and which of them leave first."""

from __future__ import annotations

from array import array

from headrace.core.block_pool import BlockPool
from headrace.core.eviction_order import IdleBlocks, LeafQueue
from headrace.core.interfaces import CacheTier
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.prefix_match import PrefixMatch, first_block_needed, fit_windows
from headrace.core.radix_tree import TOKEN_BYTES, RadixNode, RadixTree

MAX_FENCED_SKIPS = 16  # leaves or blocks in use by a step in flight that one eviction looks past


class RadixCache:
    """Shares the KV of prompts that start alike.

    The tree holds one reference to each of its blocks. A request locks the path it uses: no position of a locked path
    leaves. Otherwise the least recently used leaf loses its last block first, in all groups at once, so that access
    order is exact for each block (as in SGLang's RadixAttention, cut at blocks). A sliding group's block that only
    the tree holds may also leave alone, from anywhere, since later tokens do not read it.

    With a tier, blocks that leave are offered to it; those it takes are "in transfer" until it releases them.
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
        self.idle = IdleBlocks()
        self.in_transfer: set[int] = set()
        self.pinned: dict[int, int] = {}  # block -> copies of the step being scheduled that read it
        self.num_evicted_blocks = 0
        self._tier = tier
        self._leaves = LeafQueue()
        self._num_unlocked = 0  # positions (blocks a group) of nodes without locks

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that eviction can take from the tree. Some may still be fenced; a block that a fork shares but has
        not committed yet counts once its parent is gone, and is only dropped when its turn comes."""
        return self._num_unlocked * self.num_full_groups + len(self.idle)

    # -- lookup ----------------------------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: bytes, min_copy_tokens: int | None) -> PrefixMatch:
        """The longest usable prefix of ``tokens`` (uint32 bytes), and mark it used.

        min_copy_tokens: least number of tokens worth copying from a block that matches in part; None: never copy.
        """
        tree = self.tree
        root = tree.roots.get(namespace)
        if root is None:
            return PrefixMatch(block_ids=[[] for _ in range(self.num_groups)], version=tree.version)
        end = len(tokens) - len(tokens) % tree.block_bytes
        node, matched = tree.descend(root, tokens, end)
        num_blocks = matched // tree.block_bytes
        source, num_partial = self._partial_source(
            node, tokens[matched : matched + tree.block_bytes], min_copy_tokens
        )
        ids = self._touch_path(node)
        groups = [(ids[g], window) for g, window in self.windows.items()]
        fit, num_partial = fit_windows(groups, num_blocks, num_partial, self.block_size)
        node = tree.ancestor_at(node, num_blocks - fit)
        num_tokens = fit * self.block_size + num_partial
        return PrefixMatch(
            num_tokens=num_tokens,
            num_full_blocks=fit,
            block_ids=self._visible(ids, fit, num_tokens),
            partial=(source, num_partial) if num_partial else None,
            node=node,
            version=tree.version,
        )

    def pinned_by(self, match: PrefixMatch) -> int:
        """Evictable blocks that adopting this match would pin."""
        num_positions, node = 0, match.node
        while node is not None and node.parent is not None:
            if not node.num_locks:
                num_positions += node.num_blocks
            node = node.parent
        idle = sum(block in self.idle for g in self.windows for block in match.block_ids[g])
        return num_positions * self.num_full_groups + idle

    # -- holding -----------------------------------------------------------------------------------------------------

    def lock(self, node: RadixNode) -> None:
        """Keep the path from the root to ``node`` in the tree until ``unlock``."""
        step: RadixNode | None = node
        while step is not None:
            if not step.num_locks:
                self._num_unlocked -= step.num_blocks
            step.num_locks += 1
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one ``lock``; the path counts as used now."""
        time = self.tree.tick()
        while node.parent is not None:
            node.num_locks -= 1
            node.access_time = time
            if not node.num_locks:
                self._num_unlocked += node.num_blocks
                if not node.children:
                    self._leaves.push(node)
            node = node.parent
        node.num_locks -= 1
        self.tree.drop_if_bare(node)

    def acquire(self, ids: list[int]) -> None:
        """A request has taken a reference to these blocks of a sliding group."""
        for block in ids:
            self.idle.discard(block)

    def release(self, ids: list[int]) -> None:
        """A request has given up its reference to these blocks of a sliding group; the last one is the least needed
        and becomes the oldest."""
        ref_count, node_of = self.pool.ref_count, self.tree.node_of
        for block in reversed(ids):
            if block >= 0 and ref_count[block] == 1 and block in node_of:
                self.idle.add(block, self.tree.clock)

    def pin(self, ids: list[int]) -> None:
        """Hold blocks (of any group) that a block copy of the step being scheduled reads."""
        self.pool.incref(ids)
        for block in ids:
            self.pinned[block] = self.pinned.get(block, 0) + 1
            self.idle.discard(block)

    def unpin(self, ids: list[int]) -> None:
        """Undo ``pin``: the step has taken the copies (and fences the blocks), or they are cancelled."""
        for block in ids:
            self.pinned[block] -= 1
            if not self.pinned[block]:
                del self.pinned[block]
        self.pool.decref(ids)
        self.release(ids)

    def insert(self, node: RadixNode, tokens: bytes, blocks: list[list[int]]) -> RadixNode:
        """Continue the locked path that ends at ``node`` with whole blocks; the lock moves to the node returned.

        Where the tree has a position already it keeps its block, unless nobody else uses that (or it is gone): then
        it takes the request's, so that no duplicate stays. Otherwise the request keeps its own duplicate.
        """
        tree, size = self.tree, self.tree.block_bytes
        start = 0
        while start < len(tokens):
            child = node.children.get(tokens[start : start + size])
            first = start // size
            if child is None:
                new = [ids[first:] for ids in blocks]
                node = tree.append(node, tokens[start:], new)
                for ids in new:
                    self.pool.incref(ids)
                return node
            common = tree.common_blocks(child, tokens, start, len(tokens))
            node = child if common == child.num_blocks else tree.split(child, common)
            if not node.num_locks:
                self._num_unlocked -= node.num_blocks
            node.num_locks += 1
            for group in range(self.num_groups):
                self._take_over(node, group, blocks[group][first : first + common])
            start += common * size
        return node

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict(self, num_free_wanted: int) -> None:
        """Evict until the pool has so many free blocks, counting those that a tier took and will release.

        Blocks that a step in flight may read are passed over (they would be fenced, not free): fewer may result.
        """
        passed_over: list[RadixNode] = []
        while self.pool.num_free + len(self.in_transfer) < num_free_wanted:
            leaf = (
                self._leaves.oldest()
                if self.num_full_groups and len(passed_over) < MAX_FENCED_SKIPS
                else None
            )
            idle = self._oldest_idle()
            if idle is not None and (leaf is None or idle[1] < leaf.access_time):
                self._evict_idle(idle[0])
            elif leaf is None:
                break
            else:
                self._leaves.pop()
                if not self._evict_tail(leaf, num_free_wanted):
                    passed_over.append(leaf)
                elif leaf.tokens:
                    self._leaves.push(leaf)
        for leaf in passed_over:
            self._leaves.push(leaf)

    def release_transfer(self, ids: list[int]) -> None:
        """The tier is done with blocks that it took."""
        for block in ids:
            if block >= 0:
                self.in_transfer.remove(block)
        self.pool.decref(ids)

    def reset(self) -> bool:
        """Drop every node that no request holds, without offering it to the tier. True if the tree is empty now."""
        for block in self.idle.blocks():
            self._drop_idle(block)
        for node in reversed(list(self.tree.nodes())):
            if not node.num_locks:
                self._num_unlocked -= node.num_blocks
                for ids in self.tree.drop_tail(node, node.num_blocks):
                    self.pool.decref(ids)
        for root in list(self.tree.roots.values()):
            self.tree.drop_if_bare(root)
        return not any(root.children for root in self.tree.roots.values())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _partial_source(
        self, node: RadixNode, tokens: bytes, min_copy_tokens: int | None
    ) -> tuple[list[int], int]:
        """(block of each group to copy from, tokens in common), or ([], 0)."""
        if min_copy_tokens is None or len(tokens) < min_copy_tokens * TOKEN_BYTES or not node.children:
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
        ids: list[list[int]] = [[] for _ in range(self.num_groups)]
        for step in reversed(path):
            for held, new in zip(ids, step.blocks, strict=True):
                held += new
        return ids

    def _visible(self, ids: list[list[int]], num_blocks: int, num_tokens: int) -> list[list[int]]:
        """The first ``num_blocks`` ids of each group, with -1 before each window; idle ones are marked used."""
        visible = [held if len(held) == num_blocks else held[:num_blocks] for held in ids]
        for group, window in self.windows.items():
            first = first_block_needed(num_tokens, window, self.block_size)
            visible[group][:first] = [-1] * first
            for block in reversed(visible[group][first:]):
                if block in self.idle:
                    self.idle.add(block, self.tree.clock)
        return visible

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
            self.idle.discard(old)
            pool.decref((old,))

    def _oldest_idle(self) -> tuple[int, int] | None:
        for block, time in self.idle.first(MAX_FENCED_SKIPS):
            if not self._is_read(block):
                return block, time
        return None

    def _is_read(self, block: int) -> bool:
        """True if a step in flight, or a copy of the one being scheduled, may read the block."""
        return self.pool.is_fenced(block) or block in self.pinned

    def _evict_tail(self, leaf: RadixNode, num_free_wanted: int) -> bool:
        """Evict blocks from the end of a leaf while they are needed and may be reused; False if none may."""
        pool = self.pool
        missing = num_free_wanted - pool.num_free - len(self.in_transfer)
        num_positions = 0
        for position in zip(*map(reversed, leaf.blocks), strict=True):
            if missing <= 0 or any(block >= 0 and self._is_read(block) for block in position):
                break
            num_positions += 1
            missing -= sum(block >= 0 and pool.ref_count[block] == 1 for block in position)
        if not num_positions:
            return False
        namespace, prefix = self.tree.path_tokens(leaf) if self._tier is not None else ("", b"")
        parent = leaf.parent
        dropped = self.tree.drop_tail(leaf, num_positions)
        self._num_unlocked -= num_positions
        for position in list(zip(*dropped, strict=True))[::-1]:
            self._let_go(namespace, prefix, list(position))
            prefix = prefix[: -self.tree.block_bytes]
        if not leaf.tokens and parent is not None:
            self._prune(parent)
        return True

    def _evict_idle(self, block: int) -> None:
        """Evict one sliding block from wherever it is in the tree."""
        node, group, index = self.tree.place_of(block)
        namespace, prefix = "", b""
        if self._tier is not None:
            namespace, prefix = self.tree.path_tokens(node)
            prefix = prefix[: len(prefix) - (node.num_blocks - 1 - index) * self.tree.block_bytes]
        self.tree.replace_block(node, group, index, -1)
        position = [-1] * self.num_groups
        position[group] = block
        self._let_go(namespace, prefix, position)
        if not self.num_full_groups:
            self._prune(node)

    def _drop_idle(self, block: int) -> None:
        node, group, index = self.tree.place_of(block)
        self.tree.replace_block(node, group, index, -1)
        self.idle.discard(block)
        self.pool.decref((block,))

    def _let_go(self, namespace: str, prefix: bytes, position: list[int]) -> None:
        """One position's blocks have left the tree: offer those that nobody else holds to the tier, else free them."""
        pool = self.pool
        for group in self.windows:
            self.idle.discard(position[group])
        self.num_evicted_blocks += sum(block >= 0 for block in position)
        if self._tier is not None:
            sole = [block if block >= 0 and pool.ref_count[block] == 1 else -1 for block in position]
            taken = {block for block in sole if block >= 0}
            if taken and self._tier.on_evict(namespace, array("I", prefix).tolist(), sole):
                self.in_transfer |= taken
                position = [block for block in position if block not in taken]
        pool.decref(position)

    def _prune(self, node: RadixNode) -> None:
        """Something below or in ``node`` left: drop the ends of its path that hold no block, queue a new leaf."""
        while node.parent is not None and not node.children and not node.num_locks:
            if self.num_full_groups:
                self._leaves.push(node)
                return
            bare = 0
            for position in zip(*map(reversed, node.blocks), strict=True):
                if any(block >= 0 for block in position):
                    break
                bare += 1
            if not bare:
                return
            parent = node.parent
            self.tree.drop_tail(node, bare)
            self._num_unlocked -= bare
            if node.tokens:
                return
            node = parent
        if node.parent is None:
            self.tree.drop_if_bare(node)
