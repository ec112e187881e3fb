"""A compressed radix tree over tokens, cut at block boundaries: the shape of the prefix cache, without its policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

TOKEN_BYTES = 4  # tokens are held as native uint32, so that comparing them is memcmp


class RadixNode:
    """An edge of the tree: a run of whole blocks that every path through it shares.

    tokens: uint32 token ids as bytes, a whole number of blocks.
    blocks: per KV group, the id of each block; -1 where a sliding group's block is gone.
    children: by the bytes of their first block; ``keys`` holds the same keys sorted.
    num_locks: paths held by requests that pass through or end here.
    access_time: when a path through here was last used, on the tree's clock.
    is_queued: is in the queue of leaves that may be evicted.
    namespace: of a root; other nodes leave it empty.
    """

    __slots__ = (
        "access_time",
        "blocks",
        "children",
        "is_queued",
        "keys",
        "namespace",
        "num_locks",
        "parent",
        "tokens",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        tokens: bytes | bytearray,
        blocks: list[list[int]],
        access_time: int,
        num_locks: int,
    ) -> None:
        self.parent = parent
        self.tokens = bytearray(tokens)  # grows and shrinks at its end
        self.blocks = blocks
        self.children: dict[bytes, RadixNode] = {}
        self.keys: list[bytes] = []
        self.num_locks = num_locks
        self.access_time = access_time
        self.is_queued = False
        self.namespace = ""

    @property
    def num_blocks(self) -> int:
        """Blocks a group, held or gone."""
        return len(self.blocks[0])


class RadixTree:
    """One root per namespace; edges are split where paths part and never inside a block.

    tracked_groups: KV groups whose blocks can be looked up.
    homes: {block id of a tracked group: (its node, group)}.
    clock: rises with each use of the tree; nodes carry the time of their last use.
    version: rises with each change that makes an earlier match invalid (a block left or was replaced, a node's end
        moved, a root was forgotten); splits do not count, since a node that is split keeps its end.
    """

    def __init__(self, block_size: int, num_groups: int, tracked_groups: tuple[int, ...] = ()) -> None:
        self.block_bytes = block_size * TOKEN_BYTES
        self.num_groups = num_groups
        self.tracked_groups = tracked_groups
        self.roots: dict[str, RadixNode] = {}
        self.homes: dict[int, tuple[RadixNode, int]] = {}
        self.clock = 0
        self.version = 0

    def root(self, namespace: str) -> RadixNode:
        """The namespace's root, made if need be."""
        root = self.roots.get(namespace)
        if root is None:
            root = RadixNode(None, b"", [[] for _ in range(self.num_groups)], 0, 0)
            root.namespace = namespace
            self.roots[namespace] = root
        return root

    def drop_if_bare(self, root: RadixNode) -> None:
        """Forget a root that has neither children nor locks."""
        if not root.children and not root.num_locks:
            self.roots.pop(root.namespace, None)
            self.version += 1

    def tick(self) -> int:
        """The next time on the clock."""
        self.clock += 1
        return self.clock

    def descend(self, node: RadixNode, tokens: bytes, end: int) -> tuple[RadixNode, int]:
        """Follow whole blocks of ``tokens[:end]`` (bytes, both multiples of a block) down from ``node``.

        The last edge is split where the match ends. Returns (node where the match ends, bytes matched).
        """
        start, size = 0, self.block_bytes
        while start < end:
            child = node.children.get(tokens[start : start + size])
            if child is None:
                break
            length = len(child.tokens)
            if length <= end - start and tokens.startswith(child.tokens, start):
                node = child
                start += length
                continue
            common = self.common_blocks(child, tokens, start, end)
            node = child if common == child.num_blocks else self.split(child, common)
            start += common * size
            break
        return node, start

    def num_matching(self, namespace: str, tokens: bytes) -> int:
        """Tokens of whole blocks at the beginning of ``tokens`` that the tree holds. Changes nothing."""
        node, size = self.roots.get(namespace), self.block_bytes
        start, end = 0, len(tokens) - len(tokens) % size
        while node is not None and start < end:
            child = node.children.get(tokens[start : start + size])
            if child is None:
                break
            length = len(child.tokens)
            if length > end - start or not tokens.startswith(child.tokens, start):
                start += self.common_blocks(child, tokens, start, end) * size
                break
            node = child
            start += length
        return start // TOKEN_BYTES

    def common_blocks(self, node: RadixNode, tokens: bytes, start: int, end: int) -> int:
        """How many blocks of the node's edge equal ``tokens[start:end]``; at least one is known to."""
        edge, size = node.tokens, self.block_bytes
        low, high = 1, min(len(edge), end - start) // size
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(edge[low * size : middle * size], start + low * size):
                low = middle
            else:
                high = middle - 1
        return low

    def closest_child(self, node: RadixNode, tokens: bytes) -> tuple[RadixNode | None, int]:
        """The child whose first block starts most like ``tokens`` (at most a block): (child, tokens in common).

        In sorted order the longest common prefix is always with a neighbour.
        """
        best, best_common = None, 0
        place = bisect_left(node.keys, tokens)
        for key in node.keys[max(0, place - 1) : place + 1]:
            common = common_tokens(key, tokens)
            if common > best_common:
                best, best_common = node.children[key], common
        return best, best_common

    def append(self, node: RadixNode, tokens: bytes, blocks: list[list[int]]) -> RadixNode:
        """Add a run of blocks below ``node``, whose path the caller holds locked; returns its node, locked too.

        A leaf that only the caller holds grows in place, so that a request's output becomes one edge.
        """
        if node.parent is not None and node.num_locks == 1 and not node.children:
            node.tokens += tokens
            for held, new in zip(node.blocks, blocks, strict=True):
                held += new
            node.access_time = self.tick()
            self.version += 1
        else:
            node = RadixNode(node, tokens, [list(ids) for ids in blocks], self.tick(), 1)
            self._link(node)
        self._track(node, blocks)
        return node

    def split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Cut the first ``num_blocks`` of an edge off into a node above it, which is returned.

        ``node`` keeps its end, its children and the locks that end in it.
        """
        assert node.parent is not None
        cut = num_blocks * self.block_bytes
        head = [ids[:num_blocks] for ids in node.blocks]
        upper = RadixNode(node.parent, node.tokens[:cut], head, node.access_time, node.num_locks)
        node.parent.children[bytes(node.tokens[: self.block_bytes])] = upper
        del node.tokens[:cut]
        node.blocks = [ids[num_blocks:] for ids in node.blocks]
        node.parent = upper
        self._link(node)
        self._track(upper, head)
        return upper

    def ancestor_at(self, node: RadixNode, num_blocks_above: int) -> RadixNode:
        """The node on the path to ``node`` that ends ``num_blocks_above`` blocks above its end, split if need be."""
        while num_blocks_above:
            assert node.parent is not None, "asked for an ancestor above the root"
            if num_blocks_above < node.num_blocks:
                return self.split(node, node.num_blocks - num_blocks_above)
            num_blocks_above -= node.num_blocks
            node = node.parent
        return node

    def drop_tail(self, node: RadixNode, num_blocks: int) -> list[list[int]]:
        """Cut the last ``num_blocks`` off a leaf's edge; an empty leaf leaves the tree. Returns their ids by group."""
        assert node.parent is not None and not node.children, "only a leaf's tail may leave the tree"
        keep = node.num_blocks - num_blocks
        dropped = [ids[keep:] for ids in node.blocks]
        if keep == 0:
            key = bytes(node.tokens[: self.block_bytes])
            del node.parent.children[key]
            del node.parent.keys[bisect_left(node.parent.keys, key)]
        del node.tokens[keep * self.block_bytes :]
        for ids in node.blocks:
            del ids[keep:]
        for group in self.tracked_groups:
            for block in dropped[group]:
                self.homes.pop(block, None)
        self.version += 1
        return dropped

    def replace_block(self, node: RadixNode, group: int, index: int, block: int) -> int:
        """Put another block (-1: none) in a place of an edge; returns the one that was there."""
        old = node.blocks[group][index]
        node.blocks[group][index] = block
        if group in self.tracked_groups:
            self.homes.pop(old, None)
            if block >= 0:
                self.homes[block] = (node, group)
        self.version += 1
        return old

    def path_tokens(self, node: RadixNode) -> tuple[str, bytes]:
        """(namespace, all tokens from the root to the node's end)."""
        parts = []
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        return node.namespace, b"".join(reversed(parts))

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but roots, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def _link(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        key = bytes(node.tokens[: self.block_bytes])
        parent.children[key] = node
        insort(parent.keys, key)

    def _track(self, node: RadixNode, blocks: list[list[int]]) -> None:
        homes = self.homes
        for group in self.tracked_groups:
            home = (node, group)
            for block in blocks[group]:
                if block >= 0:
                    homes[block] = home


def common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix of two token strings."""
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    if not difference:
        return size // TOKEN_BYTES
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)
