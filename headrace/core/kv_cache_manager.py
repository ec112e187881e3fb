"""The scheduler's view of KV memory: match, admit, grow, commit, fork, free."""

from __future__ import annotations

import time
from collections.abc import Iterable
from copy import copy

from headrace.core.block_pool import BlockPool
from headrace.core.cache_pins import CachePins
from headrace.core.interfaces import CacheTier, Clock
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.kv_capacity import longest_request, verify_specs
from headrace.core.kv_commit import BlockCommitter
from headrace.core.kv_integrity import check_ledger
from headrace.core.kv_request import RequestBlocks, held_blocks
from headrace.core.kv_stats import KVCacheStats
from headrace.core.output import BlockCopy
from headrace.core.pending_copies import PendingCopies
from headrace.core.prefix_match import PrefixMatch, first_block_needed
from headrace.core.radix_cache import RadixCache
from headrace.core.radix_tree import RadixNode
from headrace.core.request import Request, RequestStatus

MAX_SPARE_BLOCKS = 16  # freed beyond need at an eviction, if that is no more than 0.2 % of the pool


class KVCacheManager:
    """Hands KV blocks to requests and keeps what may be shared.

    ``admit``, ``grow`` and ``fork`` are all or nothing: False, and the request unchanged, if there are not enough
    blocks now. Then wait while ``num_fenced_blocks`` is positive (a step in flight will give blocks back), or make room
    by preempting.

    ``Request.last_step_id`` must be the last step that was really started with the request when it is freed.
    """

    def __init__(
        self,
        specs: list[KVCacheSpec],
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        min_copy_tokens: int = 4,
        tier: CacheTier | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        verify_specs(specs, num_blocks, block_size)
        self.specs = specs
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_groups = len(specs)
        self.tier = tier
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, specs, block_size, tier)
        self.is_prefix_caching_enabled = enable_prefix_caching
        self.min_copy_tokens = max(1, min_copy_tokens)
        self.pins = CachePins(self.cache, clock)
        self._windows = self.cache.windows
        self._copies = PendingCopies(self.cache)
        self._committer = BlockCommitter(self.cache, block_size)
        self._requests: dict[Request, None] = {}
        self._num_spare_blocks = min(MAX_SPARE_BLOCKS, num_blocks // 512)
        self._stats = KVCacheStats()

    # ---- counts ---------------------------------------------------------------------------------------------

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that only steps in flight hold."""
        return self.pool.num_fenced

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that only the prefix cache holds and would give up."""
        return self.cache.num_evictable_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can get without a preemption: free and evictable."""
        return self.pool.num_free + self.cache.num_evictable_blocks

    def max_tokens_of_one_request(self, max_step_tokens: int = 1) -> int:
        """The longest request that fits when it is alone.

        max_step_tokens: tokens computed but not yet committed at a time, which a sliding group holds beside its
            window: a step's chunk, times the steps in flight.
        """
        return longest_request(self.specs, self.num_blocks, self.block_size, max_step_tokens)

    def stats(self) -> KVCacheStats:
        """Counters and block use, in time linear in the number of requests."""
        num_empty = sum(request.capacity_tokens - request.num_computed_tokens for request in self._requests)
        num_idle = self.num_usable_blocks + self.pool.num_fenced + len(self.cache.evictor.in_transfer)
        stats = copy(self._stats)
        stats.num_evicted_blocks = self.cache.evictor.num_evicted_blocks
        stats.num_request_slots = (self.num_blocks - num_idle) * self.block_size
        stats.num_token_slots = stats.num_request_slots - num_empty * self.num_groups
        stats.num_fenced_slots = self.pool.num_fenced * self.block_size
        return stats

    # ---- a request's life -----------------------------------------------------------------------------------

    def match(self, request: Request, max_tokens: int) -> PrefixMatch:
        """The longest usable cached prefix of ``request.token_ids[:max_tokens]``.

        Nothing is held: pass the result to ``admit`` soon. Its blocks count as used now.
        """
        return self._match(request, max_tokens, self.min_copy_tokens)

    def cached_tokens(self, request: Request) -> int:
        """Tokens of whole blocks that ``match`` would find now. Nothing counts as used by asking."""
        if not self.is_prefix_caching_enabled:
            return 0
        return self.cache.tree.num_matching(
            request.namespace, self._known_tokens(request, request.max_cached_tokens)
        )

    def admit(
        self,
        request: Request,
        match: PrefixMatch | None,
        num_tokens: int,
        step_id: int,
        reserve_blocks: int = 0,
    ) -> bool:
        """Start a request with blocks for tokens [0, ``num_tokens``), the matched ones shared.

        Sets ``block_table``, ``capacity_tokens``, ``num_computed_tokens``, ``num_committed_tokens`` and (unless it
        was preempted) ``num_cached_tokens``. A match that ends inside a block becomes a block copy of this step.

        reserve_blocks: must be left usable afterwards.
        Returns False, and changes nothing but the cache's content, when there is no room now.
        """
        assert not (isinstance(request.lock, RequestBlocks) and request.lock.is_admitted), request.request_id
        if match is None:
            match = self.cache.no_match()
        elif match.version != self.cache.tree.version:
            match = self._match(request, match.num_tokens, self.min_copy_tokens)
        if self._admit(request, match, num_tokens, step_id, reserve_blocks):
            return True
        if match.partial is None:
            return False
        # The block to copy from cannot be evicted to make room for its own copy: try whole blocks only.
        match = self._match(request, match.num_tokens, None)
        return self._admit(request, match, num_tokens, step_id, reserve_blocks)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens; False, and nothing held, if there are not enough blocks now."""
        if num_tokens <= request.capacity_tokens:
            return True
        num_new = -(-(num_tokens - request.capacity_tokens) // self.block_size)
        new = self._allocate(num_new)
        if new is None:
            return False
        for table, ids in zip(request.block_table, new, strict=True):
            table += ids
        request.capacity_tokens += num_new * self.block_size
        return True

    def take_new_blocks(self, request: Request) -> list[list[int]] | None:
        """Per group, the ids appended since the last call (or since admission); None if there are none."""
        held = held_blocks(request)
        num_blocks = request.capacity_tokens // self.block_size
        if held.num_taken == num_blocks:
            return None
        start, held.num_taken = held.num_taken, num_blocks
        return [table[start:] for table in request.block_table]

    def take_block_copies(self) -> list[BlockCopy]:
        """Copies to do in the step being scheduled, before its forward."""
        return self._copies.take()

    def commit(self, request: Request) -> None:
        """``num_committed_tokens`` rose: share newly full blocks, release sliding blocks behind the window.

        Returns at once while neither is due (see ``BlockCommitter``).
        """
        held = request.lock
        if isinstance(held, RequestBlocks) and request.num_committed_tokens >= held.wake_tokens:
            self._committer.commit(request, held)

    def free(self, request: Request) -> None:
        """Give up all blocks (finished, preempted, aborted); the fence keeps them until its last step completed.

        What is committed by then stays in the prefix cache.
        """
        held, request.lock = request.lock, None
        if not (isinstance(held, RequestBlocks) and held.is_admitted):
            return
        self._committer.share(request, held)
        if held.node is not None:
            self.cache.unlock(held.node)
        for group, table in enumerate(request.block_table):
            self._copies.cancel(table)
            self.pool.decref(table, request.last_step_id)
            if group in self._windows:
                self.cache.release(table)
        request.block_table = []
        request.capacity_tokens = 0
        del self._requests[request]

    def can_fork(self, parent: Request, num_tokens: int) -> bool:
        """False once the parent has released a sliding block that a fork at ``num_tokens`` would read."""
        num_committed = min(parent.num_committed_tokens, num_tokens)
        last = -(-num_tokens // self.block_size)
        firsts = {g: first_block_needed(num_committed, w, self.block_size) for g, w in self._windows.items()}
        return all(-1 not in parent.block_table[group][first:last] for group, first in firsts.items())

    def fork(self, parent: Request, child: Request, num_tokens: int, step_id: int) -> bool:
        """Start ``child`` with the parent's first ``num_tokens`` tokens, computed by steps before ``step_id``.

        Whole blocks are shared; the rest of the last one is copied in this step. False if there is no block for it.
        The caller has asked ``can_fork``.
        """
        num_committed = min(parent.num_committed_tokens, num_tokens)
        num_full, num_partial = divmod(num_tokens, self.block_size)
        shared = [table[:num_full] for table in parent.block_table]
        for group, window in self._windows.items():
            first = first_block_needed(num_committed, window, self.block_size)
            shared[group][:first] = [-1] * first
            assert -1 not in shared[group][first:], (
                f"{parent.request_id} has released tokens before {num_tokens}"
            )
        tables = shared
        if num_partial:
            sources = [self._copies.origin(table[num_full], num_partial) for table in parent.block_table]
            new = self._allocate_for_copies(sources, 1)
            if new is None:
                return False
            tables = [ids + own for ids, own in zip(shared, new, strict=True)]
            for src, own in zip(sources, new, strict=True):
                self._copies.add(src, own[0], num_partial, step_id)
        for ids in shared:
            self.pool.incref(ids)
        origin = held_blocks(parent)
        node, num_inserted = origin.node, min(origin.num_inserted, num_full)
        if node is not None:
            node = self.cache.tree.ancestor_at(node, origin.num_inserted - num_inserted)
            self.cache.lock(node)
        child.num_computed_tokens, child.num_committed_tokens = num_tokens, num_committed
        self._start(child, tables, node, num_inserted)
        held_blocks(child).num_same = min(origin.num_same, num_inserted)
        return True

    # ---- the engine's side ----------------------------------------------------------------------------------

    def advance(self, completed_step_id: int) -> None:
        """All steps up to this one have completed: what they alone held becomes free."""
        self.pool.advance(completed_step_id)

    def release_transfer(self, block_ids: list[int]) -> None:
        """A tier is done with blocks that it took in ``CacheTier.on_evict``; -1 entries are skipped."""
        self.cache.release_transfer(block_ids)

    def hold_loading(self, block_ids: list[int]) -> None:
        """A tier begins to fill blocks of a request: they are nobody else's until ``release_loading``, even if the
        request is cancelled meanwhile."""
        self.pool.incref(block_ids)
        self.cache.evictor.loading.update(block_ids)

    def release_loading(self, block_ids: list[int]) -> None:
        """The blocks are filled, or will not be."""
        self.cache.evictor.loading.difference_update(block_ids)
        self.pool.decref(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Drop all that no running request uses, pins too; True if nothing is left in the cache."""
        self.pins.release_all()
        return self.cache.reset()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Recompute every count from the owners. Raises AssertionError naming the block or the request."""
        check_ledger(self.cache, list(self._requests), list(requests), self.pins.nodes())

    # ---- inside ---------------------------------------------------------------------------------------------

    def _match(self, request: Request, max_tokens: int, min_copy_tokens: int | None) -> PrefixMatch:
        if not self.is_prefix_caching_enabled:
            return self.cache.no_match()
        tokens = self._known_tokens(request, max_tokens)
        return self.cache.match(request.namespace, tokens, min_copy_tokens)

    def _known_tokens(self, request: Request, max_tokens: int) -> bytes:
        if not isinstance(request.lock, RequestBlocks):
            request.lock = RequestBlocks()
        return request.lock.token_bytes(request, max_tokens)

    def _admit(
        self, request: Request, match: PrefixMatch, num_tokens: int, step_id: int, reserve_blocks: int
    ) -> bool:
        num_full = match.num_full_blocks
        num_new = max(-(-num_tokens // self.block_size) - num_full, 1 if match.partial else 0)
        need = num_new * self.num_groups
        if self.pool.num_free < need + reserve_blocks:
            sources = match.partial[0] if match.partial else []
            pinned = self.cache.pinned_by(match) + self.cache.num_idle(sources)
            if self.num_usable_blocks - pinned < need + reserve_blocks:
                return False
        node = match.node
        if node is None and self.is_prefix_caching_enabled:
            node = self.cache.tree.root(request.namespace)
        if node is not None:
            self.cache.lock(node)
        for ids in match.block_ids:
            self.pool.incref(ids)
        for group in self._windows:
            self.cache.acquire(match.block_ids[group])
        sources, num_partial = match.partial or ([], 0)
        new = self._allocate_for_copies(sources, num_new)
        if new is None:
            for group, ids in enumerate(match.block_ids):
                self.pool.decref(ids)
                if group in self._windows:
                    self.cache.release(ids)
            if node is not None:
                self.cache.unlock(node)
            return False
        tables = [shared + own for shared, own in zip(match.block_ids, new, strict=True)]
        for src, table in zip(sources, tables, strict=False):
            self._copies.add(src, table[num_full], num_partial, step_id)
        request.num_computed_tokens = request.num_committed_tokens = match.num_tokens
        if request.status is not RequestStatus.PREEMPTED:
            request.num_cached_tokens = match.num_tokens
        self._stats.num_query_tokens += request.num_tokens
        self._stats.num_hit_tokens += match.num_tokens
        self._start(request, tables, node, num_full)
        return True

    def _start(
        self, request: Request, tables: list[list[int]], node: RadixNode | None, num_inserted: int
    ) -> None:
        held = RequestBlocks()
        held.is_admitted = True
        held.node = node
        held.num_inserted = held.num_same = num_inserted
        held.num_taken = len(tables[0])
        request.lock = held
        request.block_table = tables
        request.capacity_tokens = len(tables[0]) * self.block_size
        self._requests[request] = None
        self._committer.start(request, held)

    def _allocate(self, num_blocks: int) -> list[list[int]] | None:
        """So many blocks for each group, evicting for them; None if there are not enough now."""
        wanted, pool = num_blocks * self.num_groups, self.pool
        if pool.num_free < wanted:
            if pool.num_free + self.cache.num_evictable_blocks < wanted:
                return None
            self.cache.evict(wanted, self._num_spare_blocks)
            if pool.num_free < wanted:
                return None
        return [pool.allocate(num_blocks) for _ in self.specs]

    def _allocate_for_copies(self, sources: list[int], num_blocks: int) -> list[list[int]] | None:
        """Blocks of which some will be copies of ``sources``, which are pinned before anything is evicted."""
        self.cache.pin(sources)
        new = self._allocate(num_blocks)
        if new is None:
            self.cache.unpin(sources)
        return new
