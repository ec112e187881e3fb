"""A toy engine over a KVCacheManager that knows what every slot of every block must hold.

The KV of a token depends on all tokens before it, so a slot's content is modelled as (group, namespace, hash of the
prefix that ends there). Steps run when they complete, up to ``lag`` steps after they were scheduled: copies first, then
writes, then every read of the attention window is checked. Blocks handed out are checked against steps in flight.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import BlockCopy
from headrace.core.prefix_match import PrefixMatch
from headrace.core.request import Request, RequestStatus
from headrace.sampling_params import SamplingParams

Content = tuple[int, str, int]


def full(layer: int = 0) -> KVCacheSpec:
    return KVCacheSpec("full", (layer,), 64)


def sliding(window: int, layer: int = 0) -> KVCacheSpec:
    return KVCacheSpec("sliding", (layer,), 64, window=window)


def make_request(tokens: list[int], name: str = "r", max_tokens: int = 1000, **options: object) -> Request:
    return Request(name, tokens, SamplingParams(), max_tokens=max_tokens, **options)  # type: ignore[arg-type]


def prefix_hashes(tokens: Iterable[int]) -> list[int]:
    """Per position, a hash of all tokens up to it."""
    hashes, value = [], 0
    for token in tokens:
        value = hash((value, token))
        hashes.append(value)
    return hashes


@dataclass(eq=False)
class Sequence:
    """A request, all the tokens it will ever have, and the block table that the data plane would hold."""

    request: Request
    script: list[int]
    hashes: list[int] = field(default_factory=list)
    table: list[list[int]] = field(default_factory=list)
    life: int = 0  # rises when it loses its blocks: results of older steps do not count

    def __post_init__(self) -> None:
        self.hashes = prefix_hashes(self.script)


@dataclass
class Work:
    """One sequence in one step: tokens [start, end) with the block table of that moment."""

    sequence: Sequence
    life: int
    start: int
    end: int
    table: list[list[int]]
    used: set[int]  # blocks that it reads or writes


@dataclass
class FlyingStep:
    """A step that has been scheduled and has not completed."""

    step_id: int
    copies: list[BlockCopy]
    works: list[Work]

    def blocks(self) -> set[int]:
        touched = set().union(*(work.used for work in self.works))
        touched.update(block for copy in self.copies for block in (copy.src, copy.dst))
        return touched


class TokenTier:
    """Takes some of the evicted blocks; their content must not change until it releases them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.simulation: KVSimulation | None = None
        self.taken: list[tuple[list[int], list[list[Content | None]]]] = []
        self.num_offered = 0

    def on_evict(self, namespace: str, prefix: bytes, block_ids: list[int]) -> bool:
        token_ids = list(memoryview(prefix).cast("I"))
        assert self.simulation is not None
        self.num_offered += 1
        size = self.simulation.kv.block_size
        hashes = prefix_hashes(token_ids)[-size:]
        content = self.simulation.content
        for group, block in enumerate(block_ids):
            if block >= 0:
                assert content[block] == [(group, namespace, value) for value in hashes], (
                    f"evicted block {block}"
                )
        if self.rng.random() < 0.5:
            return False
        self.taken.append((block_ids, [list(content[block]) if block >= 0 else [] for block in block_ids]))
        return True

    def release_one(self) -> None:
        assert self.simulation is not None
        ids, snapshot = self.taken.pop(self.rng.randrange(len(self.taken)))
        for block, before in zip(ids, snapshot, strict=True):
            assert block < 0 or self.simulation.content[block] == before, f"block {block} changed in transfer"
        self.simulation.kv.release_transfer(ids)


class KVSimulation:
    """Schedules sequences at random over a real manager; every operation leaves all invariants proved."""

    def __init__(
        self,
        specs: list[KVCacheSpec],
        num_blocks: int,
        block_size: int,
        *,
        lag: int = 1,
        seed: int = 0,
        tier: TokenTier | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.kv = KVCacheManager(
            specs,
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            min_copy_tokens=2,
            tier=tier,
        )
        self.tier = tier
        if tier is not None:
            tier.simulation = self
        self.lag = lag
        self.content: list[list[Content | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.flying: deque[FlyingStep] = deque()
        self.last_step_id = 0
        self.num_hit_tokens = self.num_partial_hits = self.num_forks = self.num_preemptions = 0

    # ---- what every slot holds ------------------------------------------------------------------------------

    def expect(self, sequence: Sequence, table: list[list[int]], group: int, position: int) -> None:
        """The slot of a token must hold that token's KV."""
        size = self.kv.block_size
        block = table[group][position // size]
        assert block >= 0, f"{sequence.request.request_id}: group {group} has no block for token {position}"
        wanted = (group, sequence.request.namespace, sequence.hashes[position])
        assert self.content[block][position % size] == wanted, (
            f"{sequence.request.request_id}: group {group}, token {position}, block {block} holds other KV"
        )

    def first_read(self, group: int, position: int) -> int:
        window = self.kv.specs[group].window
        return 0 if window is None else max(0, position - window + 1)

    def check_match(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Whatever a new token after the hit reads is there, in every group; a partial block through its source."""
        size = self.kv.block_size
        for group, ids in enumerate(match.block_ids):
            assert len(ids) == match.num_full_blocks
            table = [list(other) for other in match.block_ids]
            if match.partial is not None:
                table[group].append(match.partial[0][group])
            for position in range(self.first_read(group, match.num_tokens), match.num_tokens):
                self.expect(sequence, table, group, position)
        partial = match.partial[1] if match.partial is not None else 0
        assert match.num_tokens == match.num_full_blocks * size + partial < len(sequence.script)

    def check_new_blocks(self, ids: Iterable[int]) -> None:
        """A block is reused only when the last step that reads it has completed, and no transfer reads it."""
        reserved = {block for step in self.flying for block in step.blocks()}
        if self.tier is not None:
            reserved.update(block for taken, _ in self.tier.taken for block in taken)
        reused = reserved.intersection(ids) - {-1}
        assert not reused, f"blocks {reused} are handed out while they are read"

    # ---- one operation each ---------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self, sequence: Sequence, reserve_blocks: int = 0) -> bool:
        """Match and start a waiting sequence; it computes from the next step on."""
        request, kv = sequence.request, self.kv
        limit = self.rng.choice([request.num_tokens - 1] * 3 + [self.rng.randint(0, request.num_tokens - 1)])
        match = kv.match(request, limit)
        assert match.num_tokens <= limit
        self.check_match(sequence, match)
        usable, pinned = kv.num_usable_blocks, kv.cache.pinned_by(match)
        target = self.rng.randint(match.num_tokens + 1, request.num_tokens)
        if not kv.admit(request, match, target, self.last_step_id + 1, reserve_blocks):
            assert not request.block_table and request.capacity_tokens == 0
            assert kv.num_usable_blocks <= usable
            return False
        assert (
            kv.num_usable_blocks >= min(reserve_blocks, usable - pinned) and request.capacity_tokens >= target
        )
        shared = request.num_computed_tokens // kv.block_size
        self.check_new_blocks(block for table in request.block_table for block in table[shared:])
        assert kv.take_new_blocks(request) is None
        self.waiting.remove(sequence)
        self.start(sequence)
        self.num_hit_tokens += request.num_computed_tokens
        self.num_partial_hits += request.num_computed_tokens % kv.block_size > 0
        return True

    def start(self, sequence: Sequence) -> None:
        sequence.request.status = RequestStatus.RUNNING
        sequence.table = [list(table) for table in sequence.request.block_table]
        self.running.append(sequence)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
        """``child`` shares the parent's script up to ``num_tokens``; false if it could not start."""
        if not self.kv.can_fork(parent.request, num_tokens):
            return False
        if not self.kv.fork(parent.request, child.request, num_tokens, self.last_step_id + 1):
            assert not child.request.block_table
            return False
        self.check_new_blocks(
            table[-1] for table in child.request.block_table if num_tokens % self.kv.block_size
        )
        self.start(child)
        self.num_forks += 1
        return True

    def stop(self, sequence: Sequence, resume: bool) -> None:
        """Finish or preempt a running sequence; its steps may still be in flight."""
        self.running.remove(sequence)
        sequence.life += 1
        self.kv.free(sequence.request)
        assert sequence.request.block_table == [] and sequence.request.capacity_tokens == 0
        if resume:
            sequence.request.status = RequestStatus.PREEMPTED
            self.waiting.append(sequence)
            self.num_preemptions += 1

    def schedule(self) -> bool:
        """One step over a random part of the running sequences; False if none could run."""
        step_id, works = self.last_step_id + 1, []
        for sequence in self.rng.sample(self.running, self.rng.randint(0, len(self.running))):
            request = sequence.request
            start = request.num_computed_tokens
            known = min(len(sequence.script), request.num_tokens + self.lag)
            end = min(known, start + self.rng.choice([1, 1, 1, 2, 5, 11]))
            if end <= start or not self.grow(sequence, end):
                continue
            works.append((sequence, start, end))
            request.num_computed_tokens, request.last_step_id = end, step_id
        works = [item for item in works if item[0] in self.running]
        if not works:
            return False
        step = FlyingStep(step_id, self.kv.take_block_copies(), [])
        for sequence, start, end in works:
            self.take_delta(sequence)
            table = [list(ids) for ids in sequence.table]
            used = {
                block
                for group, ids in enumerate(table)
                for block in ids[self.first_read(group, start) // self.kv.block_size :]
            }
            step.works.append(Work(sequence, sequence.life, start, end, table, used))
        self.last_step_id = step_id
        self.flying.append(step)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        request, before = sequence.request, sequence.request.capacity_tokens
        missing, evictor = max(0, num_tokens - before), self.kv.cache.evictor
        needed = -(-missing // self.kv.block_size) * self.kv.num_groups
        if not self.kv.grow(request, num_tokens):
            assert request.capacity_tokens == before
            expects_blocks = self.kv.num_fenced_blocks or evictor.pinned or evictor.in_transfer
            assert expects_blocks or needed > self.kv.num_usable_blocks, "it neither waits nor lacks memory"
            return False
        assert request.capacity_tokens >= num_tokens
        new = before // self.kv.block_size
        self.check_new_blocks(block for table in request.block_table for block in table[new:])
        return True

    def take_delta(self, sequence: Sequence) -> None:
        """What the data plane learns: appended blocks only."""
        delta = self.kv.take_new_blocks(sequence.request)
        for table, ids in zip(sequence.table, delta or [[] for _ in sequence.table], strict=True):
            table += ids
        for table, truth in zip(sequence.table, sequence.request.block_table, strict=True):
            assert len(table) == len(truth)
            assert all(mine == block or block == -1 for mine, block in zip(table, truth, strict=True))

    def complete(self) -> None:
        """Run the oldest step in flight, then commit its tokens."""
        step = self.flying.popleft()
        assert not {copy.src for copy in step.copies} & {copy.dst for copy in step.copies}
        for copy in step.copies:
            self.content[copy.dst][: copy.num_tokens] = self.content[copy.src][: copy.num_tokens]
        size = self.kv.block_size
        for work in step.works:
            request, hashes = work.sequence.request, work.sequence.hashes
            for group, table in enumerate(work.table):
                for position in range(work.start, work.end):
                    slot = (group, request.namespace, hashes[position])
                    self.content[table[position // size]][position % size] = slot
        for work in step.works:
            for group in range(len(work.table)):
                for position in range(self.first_read(group, work.start), work.end):
                    self.expect(work.sequence, work.table, group, position)
        for work in step.works:
            sequence, request = work.sequence, work.sequence.request
            if work.life == sequence.life and sequence in self.running:
                request.num_committed_tokens = work.end
                if work.end >= request.num_tokens:
                    request.token_ids = sequence.script[: work.end + 1]
                self.kv.commit(request)
        self.kv.advance(step.step_id)

    def check(self) -> None:
        self.kv.check_integrity([sequence.request for sequence in [*self.running, *self.waiting]])

    def drain(self) -> None:
        """Everything ends; nothing may stay held."""
        for sequence in list(self.running):
            self.stop(sequence, resume=False)
            self.check()
        while self.flying:
            self.complete()
            self.check()
        while self.tier is not None and self.tier.taken:
            self.tier.release_one()
        self.check()
        assert self.kv.num_usable_blocks == self.kv.num_blocks and self.kv.num_fenced_blocks == 0
        assert self.kv.reset_prefix_cache()
        self.check()
        assert self.kv.pool.num_free == self.kv.num_blocks and not self.kv.cache.tree.roots
