"""Native rope_and_store against the reference op, over a cache with several layers."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.native.rope_and_store import rope_and_store
from headrace.kernels.reference import rope_and_store as reference
from tests.kernels.native.guarded import random_rows

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
BLOCKS, BLOCK_SIZE, POSITIONS = 5, 4, 50
pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


def caches(kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layers = torch.full((BLOCKS, 2, 2, kv_heads, BLOCK_SIZE, dim), 7.0, dtype=dtype)
    return layers, layers[:, 1, 0], layers[:, 1, 1]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cache_dtype", TOLERANCE)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 20), (1, 1, 2)])
def test_rope_and_store(
    dtype: torch.dtype, cache_dtype: torch.dtype, has_norm: bool, heads: int, kv_heads: int, dim: int
) -> None:
    generator = torch.Generator().manual_seed(dim)
    norms = [torch.rand(dim, generator=generator) + 0.5 if has_norm else None for _ in range(2)]
    cos_sin = torch.rand(POSITIONS, dim, generator=generator) * 2 - 1
    positions = torch.tensor([0, 49, 7, 8, 9, 20, 3])
    slots = torch.tensor([19, 0, 5, 6, 7, 8, 1])
    expected = random_rows(7, (heads + 2 * kv_heads) * dim, dtype)
    found = random_rows(7, (heads + 2 * kv_heads) * dim, dtype).clone()
    plain, plain_keys, plain_values = caches(kv_heads, dim, cache_dtype)
    layers, keys, values = caches(kv_heads, dim, cache_dtype)
    expected = expected.clone()
    sizes = (heads, kv_heads, dim)
    reference.rope_and_store(
        expected, *norms, 1e-6, cos_sin, positions, slots, plain_keys, plain_values, *sizes
    )
    rope_and_store(found, *norms, 1e-6, cos_sin, positions, slots, keys, values, *sizes)
    tolerance = max(TOLERANCE[dtype], TOLERANCE[cache_dtype])
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(layers, plain, rtol=tolerance, atol=tolerance)
    first = keys[slots[0] // BLOCK_SIZE, :, slots[0] % BLOCK_SIZE]
    stored = found[0, heads * dim : (heads + kv_heads) * dim].view(kv_heads, dim)
    assert torch.equal(first, stored.to(cache_dtype)), "what is stored is what the row holds"


def test_a_negative_slot_is_none() -> None:
    layers, keys, values = caches(1, 8, torch.float32)
    qkv = torch.randn(2, 24)
    rope_and_store(
        qkv,
        None,
        None,
        1e-6,
        torch.ones(4, 8),
        torch.tensor([0, 1]),
        torch.tensor([-1, 2]),
        keys,
        values,
        1,
        1,
        8,
    )
    assert (layers != 7.0).sum() == 16 and torch.equal(values[0, 0, 2], qkv[1, 16:])
