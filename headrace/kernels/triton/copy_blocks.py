"""copy_blocks: the first tokens of KV blocks to other blocks, over all layers of a group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.reference.copy_blocks import BlockLayout
from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BLOCK = 1024
_MAX_GRID_Y = 65535


def copy_blocks(
    kv_bytes: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    num_tokens: torch.Tensor,
    layout: BlockLayout,
) -> None:
    """See ``headrace.kernels.reference.copy_blocks.copy_blocks``."""
    if len(src) == 0:
        return
    size = next(size for size in _WORDS if layout.token_bytes % size == 0)
    words = kv_bytes.view(_WORDS[size])
    programs = min(layout.num_planes, _MAX_GRID_Y)
    _copy_blocks_kernel[(len(src), programs)](
        words,
        src,
        dst,
        num_tokens,
        words.stride(0),
        layout.num_planes,
        PLANE_WORDS=layout.block_size * layout.token_bytes // size,
        TOKEN_WORDS=layout.token_bytes // size,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def _copy_blocks_kernel(
    words_ptr,
    src_ptr,
    dst_ptr,
    num_tokens_ptr,
    block_stride,
    num_planes,
    PLANE_WORDS: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    copy = tl.program_id(0)
    wait_for_previous(PDL)
    source = words_ptr + tl.load(src_ptr + copy) * block_stride
    target = words_ptr + tl.load(dst_ptr + copy) * block_stride
    length = tl.load(num_tokens_ptr + copy).to(tl.int32) * TOKEN_WORDS
    for plane in range(tl.program_id(1), num_planes, tl.num_programs(1)):
        for start in range(0, length, BLOCK):
            word = start + tl.arange(0, BLOCK)
            inside = word < length
            place = plane * PLANE_WORDS + word
            tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)
