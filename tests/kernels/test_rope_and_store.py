"""rope_and_store against a float64 loop over tokens and heads."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference.rope_and_store import rope_and_store

H, K, D, B, EPS = 4, 2, 8, 4, 1e-6
NUM_BLOCKS = 6
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def exact_head(
    head: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    if norm is not None:
        head = head / (head.square().mean() + EPS).sqrt() * norm.double()
    a, b = head.chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("is_joint", [False, True])
def test_rope_and_store(
    dtype: torch.dtype, kv_dtype: torch.dtype, has_norms: bool, num_tokens: int, is_joint: bool
) -> None:
    """is_joint: V lies behind K in a block, or in memory of its own."""
    generator = torch.Generator().manual_seed(num_tokens)
    original = torch.randn(num_tokens, (H + 2 * K) * D, generator=generator).to(dtype)
    norms = [torch.rand(D, generator=generator) + 0.5 if has_norms else None for _ in range(2)]
    angles = torch.rand(50, D // 2, generator=generator) * 6
    positions = torch.randint(50, (num_tokens,), generator=generator)
    slots = torch.randperm(NUM_BLOCKS * B, generator=generator)[:num_tokens]
    slots[3:5] = -1  # padding
    # Two layers of a block: the op gets views of one, strided over blocks.
    caches = [torch.full((NUM_BLOCKS, 2, 2, K, B, D), 9.0, dtype=kv_dtype) for _ in range(2)]
    k_cache, v_cache = caches[0][:, 1, 0], caches[not is_joint][:, 1, 1]

    qkv = original.clone()
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    rope_and_store(qkv, *norms, EPS, cos_sin, positions, slots, k_cache, v_cache, H, K, D)

    heads = original.double().view(num_tokens, H + 2 * K, D)
    got = qkv.double().view_as(heads)
    untouched = torch.ones(NUM_BLOCKS * B, dtype=torch.bool)
    for token, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        cos, sin = angles[position].double().cos(), angles[position].double().sin()
        for head in range(H + K):
            expected = exact_head(heads[token, head], norms[0] if head < H else norms[1], cos, sin)
            tolerance = DTYPES[dtype] * (1 + expected.abs())
            assert ((got[token, head] - expected).abs() <= tolerance).all()
        if slot < 0:
            continue
        block, place = divmod(slot, B)
        rotated = qkv.view(num_tokens, -1, D)[token]
        assert torch.equal(k_cache[block, :, place], rotated[H : H + K].to(kv_dtype))
        assert torch.equal(v_cache[block, :, place], original.view_as(heads)[token, H + K :].to(kv_dtype))
        untouched[slot] = False
    assert torch.equal(got[:, H + K :], heads[:, H + K :])
    for cache in caches:
        assert (cache[:, 0] == 9.0).all()
        by_slot = cache[:, 1].permute(0, 3, 1, 2, 4).reshape(NUM_BLOCKS * B, -1)
        assert (by_slot[untouched] == 9.0).all()
    if not is_joint:
        assert (caches[0][:, :, 1] == 9.0).all() and (caches[1][:, :, 0] == 9.0).all()
