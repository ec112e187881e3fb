"""Prefixes that are kept in the cache for a time, asked for by users and operators.

A pin holds as much of its prefix as is cached, more as it gets computed, and lets go when its time is over, at a reset,
or when the engine could not go on without its memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.core.interfaces import Clock
from headrace.core.radix_cache import RadixCache
from headrace.core.radix_tree import TOKEN_BYTES, RadixNode

MAX_PINS = 1024


@dataclass(slots=True)
class Pin:
    """One prefix: uint32 token bytes, until when, and the end of the path it locks so far."""

    namespace: str
    tokens: bytes
    expires: float
    node: RadixNode | None = None
    num_bytes: int = 0


class CachePins:
    """The pins of one cache. ``refresh`` is called once a step."""

    def __init__(self, cache: RadixCache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._pins: dict[tuple[str, bytes], Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, namespace: str, tokens: bytes, ttl_s: float) -> Pin:
        """Keep a prefix for ``ttl_s`` seconds from now; a prefix pinned already is kept longer, never shorter.

        Whole blocks only: of a prefix shorter than one there is nothing to keep, and the pin returned holds nothing.
        """
        tokens = tokens[: len(tokens) - len(tokens) % self._cache.tree.block_bytes]
        expires = self._clock() + ttl_s
        if not tokens:
            return Pin(namespace, tokens, expires)
        pin = self._pins.get((namespace, tokens))
        if pin is None:
            if len(self._pins) >= MAX_PINS:
                self.release_oldest()
            pin = self._pins[namespace, tokens] = Pin(namespace, tokens, expires)
        pin.expires = max(pin.expires, expires)
        self._grow(pin)
        return pin

    def unpin(self, namespace: str, tokens: bytes) -> bool:
        """Let go of a prefix; False if it was not pinned."""
        tokens = tokens[: len(tokens) - len(tokens) % self._cache.tree.block_bytes]
        pin = self._pins.pop((namespace, tokens), None)
        if pin is not None:
            self._release(pin)
        return pin is not None

    def refresh(self) -> None:
        """Let go of what is over, and hold what has been computed since."""
        if not self._pins:
            return
        now = self._clock()
        for key, pin in list(self._pins.items()):
            if pin.expires <= now:
                del self._pins[key]
                self._release(pin)
            elif pin.num_bytes < len(pin.tokens):
                self._grow(pin)

    def release_oldest(self) -> bool:
        """Let go of the pin that would end first; False if there is none."""
        if not self._pins:
            return False
        key = min(self._pins, key=lambda key: self._pins[key].expires)
        self._release(self._pins.pop(key))
        return True

    def release_all(self) -> None:
        """Let go of every pin."""
        while self.release_oldest():
            pass

    def nodes(self) -> list[RadixNode]:
        """The last node of each path that a pin locks."""
        return [pin.node for pin in self._pins.values() if pin.node is not None]

    def locks(self) -> Counter[RadixNode]:
        """How many of each node's locks are pins'; all nodes of a pinned path are there, its root too."""
        locks: Counter[RadixNode] = Counter()
        for end in self.nodes():
            node: RadixNode | None = end
            while node is not None:
                locks[node] += 1
                node = node.parent
        return locks

    def _grow(self, pin: Pin) -> None:
        tree = self._cache.tree
        if tree.num_matching(pin.namespace, pin.tokens) * TOKEN_BYTES <= pin.num_bytes:
            return
        node, pin.num_bytes = tree.descend(tree.root(pin.namespace), pin.tokens, len(pin.tokens))
        self._cache.lock(node)
        self._release(pin)
        pin.node = node

    def _release(self, pin: Pin) -> None:
        if pin.node is not None:
            self._cache.unlock(pin.node)
            pin.node = None
