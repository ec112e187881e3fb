"""copy_blocks: the first tokens of KV blocks to other blocks, over all layers of a group."""

from __future__ import annotations

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
        """Bytes of one token in one plane, but for a scale."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scale; 0: there is none. They follow the plane's tokens."""

    @property
    def code_bytes(self) -> int:
        """Where in a plane its scales begin."""


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
    wanted = torch.arange(layout.block_size, device=src.device) < num_tokens[:, None]
    copy, token = wanted.nonzero(as_tuple=True)
    planes = kv_bytes[:, : _whole_planes(kv_bytes, layout)].unflatten(1, (layout.num_planes, -1))
    parts = [(planes[..., : layout.block_size * layout.token_bytes], layout.token_bytes)]
    if layout.scale_bytes:
        parts.append((planes[..., layout.code_bytes :], layout.scale_bytes))
    for part, token_bytes in parts:
        word = next(dtype for dtype in _WORDS if _divides(dtype, part, token_bytes))
        tokens = part.view(word).unflatten(-1, (layout.block_size, -1))
        tokens[dst[copy], :, token] = tokens[src[copy], :, token]


def _whole_planes(kv_bytes: torch.Tensor, layout: BlockLayout) -> int:
    """Bytes of a block that planes take."""
    if layout.scale_bytes:
        return kv_bytes.shape[1]
    return layout.num_planes * layout.block_size * layout.token_bytes


def _divides(word: torch.dtype, part: torch.Tensor, token_bytes: int) -> bool:
    """Whether tokens, planes and blocks begin at multiples of a word."""
    size = word.itemsize
    return (
        token_bytes % size == 0
        and all(stride % size == 0 for stride in part.stride()[:-1])
        and (part.storage_offset() % size == 0)
    )


# widest first: fewer, larger elements to move
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
