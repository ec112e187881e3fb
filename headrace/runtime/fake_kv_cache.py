"""KV memory of the fake executor: every slot holds a hash of the tokens up to and including its own."""

from __future__ import annotations

import numpy as np

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import BlockCopy, SharedPrefix

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class BlockContentError(AssertionError):
    """A slot does not hold what the control plane's accounting says, or the fence was broken."""


def hash_token(value: int, salt: int) -> int:
    """splitmix64 of (value, salt): a 64-bit integer."""
    x = (value + salt * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _hash_tokens(token_ids: list[int], first_position: int) -> np.ndarray:
    """``hash_token(position << 40, token)`` of consecutive tokens, as one vector operation."""
    places = np.arange(first_position, first_position + len(token_ids), dtype=np.uint64) << np.uint64(40)
    x = np.array(token_ids, np.uint64) * np.uint64(_GOLDEN) + places
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class FakeSequence:
    """One request's block tables and the hash that each of its positions must hold."""

    def __init__(self, request_id: str, block_ids: list[list[int]]) -> None:
        self.request_id = request_id
        self.tables = [np.array(ids, np.int64) for ids in block_ids]
        self.has_released_blocks = any(-1 in ids for ids in block_ids)
        self._hashes = np.zeros(64, np.uint64)
        self.num_tokens = 0

    @property
    def hashes(self) -> np.ndarray:
        """uint64 [num_tokens]: hash of the tokens up to and including each position."""
        return self._hashes[: self.num_tokens]

    def append_blocks(self, block_ids: list[list[int]]) -> None:
        """Add blocks at the end of each group's table."""
        assert len(block_ids) == len(self.tables), f"{len(block_ids)} groups of blocks for {len(self.tables)}"
        for group, ids in enumerate(block_ids):
            if ids:
                self.tables[group] = np.concatenate([self.tables[group], np.array(ids, np.int64)])

    def append_tokens(self, position: int, token_ids: list[int]) -> None:
        """Extend the hashes over tokens that start at ``position``, which is the present length."""
        end = position + len(token_ids)
        if end > len(self._hashes):
            grown = np.zeros(max(end, 2 * len(self._hashes)), np.uint64)
            grown[:position] = self._hashes[:position]
            self._hashes = grown
        before = int(self._hashes[position - 1]) if position else 0
        # A running sum of well-mixed terms identifies the whole prefix.
        if len(token_ids) == 1:
            self._hashes[position] = (before + hash_token(position << 40, token_ids[0])) & _MASK
        else:
            sums = np.cumsum(_hash_tokens(token_ids, position), dtype=np.uint64)
            self._hashes[position:end] = sums + np.uint64(before)
        self.num_tokens = end


Span = tuple[FakeSequence, int, int]


class FakeKVCache:
    """Slots of ``num_blocks`` blocks, shared by all KV groups as the real pool is.

    A slot's content is the prefix hash plus a tag of the group that wrote it, so that a block used by two groups at
    once shows, too. A span is (sequence, start, end): positions [start, end) are computed in this step.
    """

    def __init__(self, specs: list[KVCacheSpec], num_blocks: int, block_size: int) -> None:
        self._windows = [spec.window for spec in specs]
        self._tags = [np.uint64(hash_token(group + 1, 1)) for group in range(len(specs))]
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._content = np.zeros((num_blocks, block_size), np.uint64)

    def forget(self) -> None:
        """Nothing that was written before is right for any sequence."""
        self._content[:] = 0

    def check_ids(self, block_ids: list[list[int]], lowest: int) -> None:
        """Assert that every id is in [lowest, num_blocks); ``lowest`` is -1 where released blocks may be named."""
        for ids in block_ids:
            if ids and not (min(ids) >= lowest and max(ids) < self._num_blocks):
                raise BlockContentError(f"block ids {ids} are not all in [{lowest}, {self._num_blocks})")

    def read(self, sequence: FakeSequence, position: int) -> int:
        """The prefix hash found in group 0's slot of ``position``."""
        block, offset = divmod(position, self._block_size)
        return (int(self._content[sequence.tables[0][block], offset]) - int(self._tags[0])) & _MASK

    def copy(self, copy: BlockCopy) -> None:
        """Copy the first ``num_tokens`` slots of a block."""
        self.check_ids([[copy.src, copy.dst]], lowest=0)
        self._content[copy.dst, : copy.num_tokens] = self._content[copy.src, : copy.num_tokens]

    def write(self, sequence: FakeSequence, start: int, end: int) -> None:
        """Compute positions [start, end): put their hashes into their slots, in every group."""
        for group, tag in enumerate(self._tags):
            if end - start == 1:
                block = self._blocks(sequence, group, start, end)[0]
                self._content[block, start % self._block_size] = (
                    int(sequence.hashes[start]) + int(tag)
                ) & _MASK
                continue
            positions = np.arange(start, end)
            blocks = self._blocks(sequence, group, start, end)
            places = positions // self._block_size - start // self._block_size
            self._content[blocks[places], positions % self._block_size] = sequence.hashes[start:end] + tag

    def check_content(self, sequence: FakeSequence, start: int, end: int) -> None:
        """Assert that every slot that positions [start, end) attend to holds the right hash."""
        for group in range(len(sequence.tables)):
            first = self._first_needed(group, start)
            blocks = self._blocks(sequence, group, first, end)
            skip = first % self._block_size
            found = self._content[blocks].reshape(-1)[skip : skip + end - first]
            wrong = np.flatnonzero(found != sequence.hashes[first:end] + self._tags[group])
            if len(wrong):
                position = first + int(wrong[0])
                raise BlockContentError(
                    f"request {sequence.request_id!r}, group {group}: {len(wrong)} slots hold the wrong content, first "
                    f"that of position {position} (block {sequence.tables[group][position // self._block_size]}); "
                    f"the step computes [{start}, {end})"
                )

    def uses(self, copies: list[BlockCopy], spans: list[Span]) -> np.ndarray:
        """int32 [num_blocks]: 1 + the highest slot of each block that a step reads or writes, 0 if it does neither."""
        uses = np.zeros(self._num_blocks, np.int32)
        for copy in copies:
            uses[copy.src] = max(uses[copy.src], copy.num_tokens)
            uses[copy.dst] = max(uses[copy.dst], copy.num_tokens)
        for sequence, start, end in spans:
            for group in range(len(sequence.tables)):
                blocks = self._blocks(sequence, group, self._first_needed(group, start), end)
                last = max(int(uses[blocks[-1]]), (end - 1) % self._block_size + 1)
                uses[blocks] = self._block_size
                uses[blocks[-1]] = last
        return uses

    def check_fence(self, earlier: list[np.ndarray], copies: list[BlockCopy], spans: list[Span]) -> None:
        """Assert that no slot is written below the highest one that an earlier outstanding step uses in its block.

        A request that goes on appending to its own last block stays above; a block given to a new owner too early is
        written from its start.
        """
        if not earlier:
            return
        used = np.maximum.reduce(earlier)
        for copy in copies:
            if used[copy.dst]:
                raise BlockContentError(f"block {copy.dst} is copied into while an outstanding step uses it")
        for sequence, start, end in spans:
            for group in range(len(sequence.tables)):
                blocks = self._blocks(sequence, group, start, end)
                if used[blocks[0]] > start % self._block_size or (len(blocks) > 1 and used[blocks[1:]].any()):
                    raise BlockContentError(
                        f"request {sequence.request_id!r}, group {group}: one of blocks {blocks.tolist()} is written "
                        f"while an outstanding step uses it; the step computes [{start}, {end})"
                    )

    def check_shared_prefixes(self, prefixes: list[SharedPrefix], sequences: list[FakeSequence]) -> None:
        """Assert that the requests of a shared prefix do have the same first blocks (-1, released, fits any)."""
        for prefix in prefixes:
            tables = sequences[prefix.batch_indices[0]].tables
            for index in prefix.batch_indices:
                for mine, first in zip(sequences[index].tables, tables, strict=True):
                    ours, theirs = mine[: prefix.num_blocks], first[: prefix.num_blocks]
                    if len(ours) != len(theirs) or np.any((ours != theirs) & (ours >= 0) & (theirs >= 0)):
                        raise BlockContentError(
                            f"batch index {index} does not share {prefix.num_blocks} blocks"
                        )

    def _first_needed(self, group: int, start: int) -> int:
        window = self._windows[group]
        return 0 if window is None else max(0, start - window + 1)

    def _blocks(self, sequence: FakeSequence, group: int, first: int, end: int) -> np.ndarray:
        """The blocks that hold positions [first, end). Raises BlockContentError if one is missing or released."""
        table = sequence.tables[group]
        needed = (end - 1) // self._block_size + 1
        blocks = table[first // self._block_size : needed]
        if len(table) < needed or (sequence.has_released_blocks and blocks.min() < 0):
            raise BlockContentError(
                f"request {sequence.request_id!r}, group {group}: positions [{first}, {end}) need blocks "
                f"{first // self._block_size}..{needed - 1} of the table {table.tolist()}"
            )
        return blocks
