"""What of a prompt is already in the cache, and how sliding windows bound it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.radix_tree import RadixNode


@dataclass(slots=True)
class PrefixMatch:
    """The longest usable cached prefix of a request.

    num_tokens: tokens that need not be computed, those of the partial block included.
    num_full_blocks: whole blocks that can be shared.
    block_ids: per KV group, the ids of these blocks; -1 before a sliding group's window.
    partial: (source block per group, tokens) when the hit ends inside a block, whose tokens come by copying.
    node: the node of the tree that ends where the whole blocks end; None without a hit in the tree.
    version: the tree's version for which this is true.
    """

    num_tokens: int = 0
    num_full_blocks: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    partial: tuple[list[int], int] | None = None
    node: RadixNode | None = None
    version: int = 0


def first_block_needed(num_tokens: int, window: int, block_size: int) -> int:
    """First block that a token at position ``num_tokens`` or later reads: it attends to positions > itself - window."""
    return max(0, num_tokens - window + 1) // block_size


def fit_windows(
    groups: list[tuple[list[int], int]], num_blocks: int, num_partial_tokens: int, block_size: int
) -> tuple[int, int]:
    """The longest hit whose window is present in every sliding group: (whole blocks, tokens of a partial block).

    groups: (block ids along the matched path, -1 where gone; window) of each sliding group.
    A partial ending only helps at the end of the match: anywhere else a whole block is the easier and longer hit.
    """
    while num_blocks:
        num_tokens = num_blocks * block_size + num_partial_tokens
        holes = []
        for ids, window in groups:
            first = first_block_needed(num_tokens, window, block_size)
            if -1 in ids[first:num_blocks]:
                holes.append(max(i for i in range(first, num_blocks) if ids[i] < 0))
        if not holes:
            break
        if num_partial_tokens:
            num_partial_tokens = 0
        else:
            num_blocks = min(holes)
    return num_blocks, num_partial_tokens
