from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference.copy_blocks import copy_blocks
from headrace.runtime.kv_cache import KVCacheLayout


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(8, torch.float32), (3, torch.bfloat16), (6, torch.bfloat16), (5, torch.uint8)]
)
def test_first_tokens_of_every_plane_are_copied(head_dim: int, dtype: torch.dtype) -> None:
    layout = KVCacheLayout(num_layers=3, num_kv_heads=2, block_size=4, head_dim=head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (9, layout.bytes_per_block), dtype=torch.uint8, generator=generator)
    planes = blocks.view(9, layout.num_planes, 4, layout.token_bytes)
    expected = planes.clone()
    copies = [(0, 5, 4), (1, 6, 1), (1, 7, 3), (2, 8, 0)]
    for src, dst, count in copies:
        expected[dst, :, :count] = planes[src, :, :count]
    src, dst, num_tokens = (torch.tensor(column) for column in zip(*copies, strict=True))
    copy_blocks(blocks, src, dst, num_tokens, layout)
    assert torch.equal(planes, expected)


def test_no_copies() -> None:
    layout = KVCacheLayout(num_layers=1, num_kv_heads=1, block_size=2, head_dim=4, dtype=torch.float32)
    blocks = torch.arange(2 * layout.bytes_per_block, dtype=torch.uint8).view(2, -1)
    none = torch.empty(0, dtype=torch.int64)
    before = blocks.clone()
    copy_blocks(blocks, none, none, none, layout)
    assert torch.equal(blocks, before)
