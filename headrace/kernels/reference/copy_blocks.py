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
    word = next(dtype for dtype in _WORDS if layout.token_bytes % dtype.itemsize == 0)
    planes = kv_bytes.view(word).view(kv_bytes.shape[0], layout.num_planes, layout.block_size, -1)
    wanted = torch.arange(layout.block_size, device=src.device) < num_tokens[:, None]
    copy, token = wanted.nonzero(as_tuple=True)
    planes[dst[copy], :, token] = planes[src[copy], :, token]


# widest first: fewer, larger elements to move
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
