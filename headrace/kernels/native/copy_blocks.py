"""copy_blocks; see kernels/reference/copy_blocks.py."""

from __future__ import annotations

import torch

from headrace.kernels.native.run import run
from headrace.kernels.native.structs import CopyBlocksArgs
from headrace.kernels.reference.copy_blocks import BlockLayout


def copy_blocks(
    kv_bytes: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    num_tokens: torch.Tensor,
    layout: BlockLayout,
) -> None:
    """See the reference."""
    assert kv_bytes.is_contiguous() and all(index.is_contiguous() for index in (src, dst, num_tokens))
    block_bytes, plane_bytes = kv_bytes.shape[1], layout.block_size * layout.token_bytes
    assert layout.num_planes * plane_bytes <= block_bytes
    args = CopyBlocksArgs(
        rows=len(src),
        blocks=kv_bytes.data_ptr(),
        src=src.data_ptr(),
        dst=dst.data_ptr(),
        num_tokens=num_tokens.data_ptr(),
        block_bytes=block_bytes,
        num_planes=layout.num_planes,
        plane_bytes=plane_bytes,
        token_bytes=layout.token_bytes,
    )
    run(args, len(src) * block_bytes // 4)
