"""Blocks that are rounded on their way to a tier: smaller, and close to what they were."""

from __future__ import annotations

import pytest
import torch

from headrace.kv_transfer.compression import BlockCompression
from headrace.kv_transfer.host_memory import HostMemory
from headrace.runtime.kv_cache import KVCacheLayout
from tests.kv_transfer.test_host_memory import Item, wait

SHAPE = (3, 2, 2, 16, 24)
ERROR = {"int8": (0.01, 0.01), "int4": (0.06, 0.11)}
"""Of keys, and of values, in relation to their size."""


def layout(dtype: torch.dtype) -> KVCacheLayout:
    return KVCacheLayout(3, 2, 16, 24, dtype)


def numbers(dtype: torch.dtype, blocks: int = 1) -> torch.Tensor:
    """Blocks whose keys have one large channel, as models' do."""
    made = torch.randn(blocks, *SHAPE, generator=torch.Generator().manual_seed(0))
    made[:, :, 0, :, :, 5] += 8.0
    return made.to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ERROR)
def test_blocks_come_back_within_the_rounding(name: str, dtype: torch.dtype) -> None:
    compression = BlockCompression(name, layout(dtype), dtype)
    block = numbers(dtype)
    packed = compression.compress(block.flatten().view(torch.uint8))
    bytes_a_pair = {"int8": 2 * (24 + 4), "int4": 12 + 3 + 4 + 12 + 4}[name]
    assert len(packed) == compression.num_bytes == 3 * 2 * 16 * bytes_a_pair
    restored = compression.restore(packed)
    assert restored.dtype == torch.uint8 and len(restored) == block.nbytes
    found = restored.view(dtype).view(SHAPE)
    for part in (0, 1):
        assert error(found[:, part], block[0, :, part]) < ERROR[name][part]


@pytest.mark.parametrize("name", ERROR)
def test_host_memory_holds_more_blocks_and_gives_them_back(name: str) -> None:
    blocks = numbers(torch.float32, blocks=4).flatten(1).view(torch.uint8)
    before = blocks.clone()
    plain = HostMemory(blocks, 2 * blocks.shape[1], None)
    host = HostMemory(
        blocks, 2 * blocks.shape[1], None, BlockCompression(name, layout(torch.float32), torch.float32)
    )
    assert plain.num_slots == 2 and host.num_slots >= 6 and len(host.view(1)) == host.slot_bytes
    host.store(3, 0)
    host.store(2, 5)
    blocks.zero_()
    assert wait(host.load([Item(b"a", 5, 0, False), Item(b"b", 0, 1, False)], None)).num_done == 2
    for slot, block in ((0, 2), (1, 3)):
        found = blocks[slot].view(torch.float32).view(SHAPE)
        expected = before[block].view(torch.float32).view(SHAPE)
        assert error(found, expected) < ERROR[name][1]
    assert not blocks[2:].any()
    for each in (plain, host):
        each.shutdown()
