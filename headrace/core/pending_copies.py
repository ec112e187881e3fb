"""Block copies of the step that is being scheduled."""

from __future__ import annotations

from headrace.core.output import BlockCopy
from headrace.core.radix_cache import RadixCache


class PendingCopies:
    """Collects copies until the step takes them. Sources are pinned until then, and fenced by the step afterwards."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._copies: dict[int, tuple[BlockCopy, int]] = {}  # dst -> (copy, step id)

    def origin(self, block: int, num_tokens: int) -> int:
        """The block that holds these tokens before the step's copies: ``block``, or what will be copied into it."""
        if block not in self._copies:
            return block
        copy = self._copies[block][0]
        assert num_tokens <= copy.num_tokens, f"block {block} has {copy.num_tokens} tokens, not {num_tokens}"
        return copy.src

    def add(self, src: int, dst: int, num_tokens: int, step_id: int) -> None:
        """Record a copy. The caller has pinned the source, which no copy of this step fills."""
        self._copies[dst] = (BlockCopy(src, dst, num_tokens), step_id)

    def cancel(self, destinations: list[int]) -> None:
        """These blocks are given up before the step was taken: forget copies into them."""
        if self._copies:
            copies = [self._copies.pop(dst)[0] for dst in destinations if dst in self._copies]
            self._cache.unpin([copy.src for copy in copies])

    def take(self) -> list[BlockCopy]:
        """All copies, which now belong to their step."""
        if not self._copies:
            return []
        entries = list(self._copies.values())
        self._copies.clear()
        for copy, step_id in entries:
            self._cache.pool.touch((copy.src, copy.dst), step_id)
            self._cache.unpin([copy.src])
        return [copy for copy, _ in entries]
