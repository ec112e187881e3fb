"""copy_blocks: the first tokens of KV blocks to other blocks, over all layers of a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class BlockLayout(Protocol):
    """The part of a block's layout that copying needs: [num_planes, block_size, token_bytes]."""

    @property
    def num_planes(self) -> int:
        """Planes of tokens in a block (layers x K and V x heads)."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one plane."""


def copy_blocks(
    kv_bytes: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    num_tokens: torch.Tensor,
    layout: BlockLayout,
) -> None:
    """For each copy c, tokens [0, num_tokens[c]) of block src[c] go to block dst[c]; the rest of dst is untouched.

    Args:
        kv_bytes: [num_blocks, bytes_per_block] uint8.
        src, dst, num_tokens: [C] int64 on the same device. No block is a destination twice, or both source and
            destination (all sources are read as they were before the call).
        layout: how a block's bytes divide into planes and tokens.
    """
    planes = kv_bytes[:, : layout.num_planes * layout.block_size * layout.token_bytes]
    copy_tokens([planes.unflatten(1, (layout.num_planes, layout.block_size, -1))], src, dst, num_tokens)


def copy_tokens(
    parts: Iterable[torch.Tensor], src: torch.Tensor, dst: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """The same for what is stored in several parts.

    Args:
        parts: [num_blocks, ..., block_size, bytes] uint8 each, the last dense.
    """
    copy = token = None
    for part in parts:
        if copy is None or token is None:
            wanted = torch.arange(part.shape[-2], device=src.device) < num_tokens[:, None]
            copy, token = wanted.nonzero(as_tuple=True)
        word = next(dtype for dtype in _WORDS if _divides(dtype, part))
        tokens = part.view(word).movedim(-2, 1)
        tokens[dst[copy], token] = tokens[src[copy], token]


def _divides(word: torch.dtype, part: torch.Tensor) -> bool:
    """Whether tokens and whatever they lie in begin at multiples of a word."""
    places = (part.shape[-1], part.storage_offset(), *part.stride()[:-1])
    return all(place % word.itemsize == 0 for place in places)


# widest first: fewer, larger elements to move
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
