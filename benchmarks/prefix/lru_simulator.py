"""An exact least-recently-used prefix cache at block granularity: the yardstick for the radix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockLRU:
    """Requests run one after another in a pool of ``num_blocks`` blocks; full blocks stay until their room is needed.

    A block is known by all tokens up to its end. Each use marks a prefix's blocks used from its last block to its
    first, so the least recently used block is never one that a cached block extends.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()  # oldest first

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Run one request; returns the tokens of its prompt that were cached, in whole blocks.

        The last answer token's KV is never computed, and at least one prompt token is.
        """
        tokens = [*prompt, *answer][:-1]
        keys = self._keys(tokens)
        hits = 0
        while hits < (len(prompt) - 1) // self.block_size and keys[hits] in self._blocks:
            hits += 1
        self._use(keys[:hits])
        num_needed = -(-len(tokens) // self.block_size) - hits
        while self.num_blocks - len(self._blocks) < num_needed:
            victim = next(key for key in self._blocks if key not in keys[:hits])
            del self._blocks[victim]
        self._use(keys)
        self.num_hit_tokens += hits * self.block_size
        self.num_prompt_tokens += len(prompt)
        return hits * self.block_size

    def _use(self, keys: list[int]) -> None:
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)

    def _keys(self, tokens: list[int]) -> list[int]:
        keys, value = [], 0
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            value = hash((value, *tokens[start : start + self.block_size]))
            keys.append(value)
        return keys
