"""Native copy_blocks against the reference op."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.native.copy_blocks import copy_blocks
from headrace.kernels.reference import copy_blocks as reference
from headrace.runtime.kv_cache import KVCacheLayout

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("head_dim", [1, 7, 64])
@pytest.mark.parametrize("block_size", [1, 16])
def test_copy_blocks(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    layout = KVCacheLayout(3, 2, block_size, head_dim, dtype)
    blocks = torch.randint(0, 256, (12, layout.bytes_per_block), dtype=torch.uint8)
    src, dst = torch.tensor([0, 5, 0, 7]), torch.tensor([3, 1, 2, 11])
    counts = torch.tensor([block_size, 0, 1, (block_size + 1) // 2])
    expected = blocks.clone()
    reference.copy_blocks(expected, src, dst, counts, layout)
    copy_blocks(blocks, src, dst, counts, layout)
    assert torch.equal(blocks, expected)


def test_no_copies() -> None:
    layout = KVCacheLayout(1, 1, 4, 8, torch.float32)
    blocks = torch.ones(2, layout.bytes_per_block, dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.int64)
    copy_blocks(blocks, none, none, none, layout)
    assert (blocks == 1).all()
