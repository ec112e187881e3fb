"""Triton rope_and_store against float64, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.rope_and_store import rope_and_store
from tests.kernels.triton_setup import DEVICE, HALF, max_error, relative_error

EPS = 1e-6


def check(
    tokens: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    has_norms: bool,
    block_size: int = 16,
    num_blocks: int = 3,
    padding: int = 0,
) -> None:
    num_heads, num_kv, dim = heads
    generator = torch.Generator(device=DEVICE).manual_seed(tokens)
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv) * dim, generator=generator, device=DEVICE).to(dtype)
    original = qkv.clone()
    norms = [
        torch.rand(dim, generator=generator, device=DEVICE) + 0.5 if has_norms else None for _ in range(2)
    ]
    angles = torch.rand(50, dim // 2, generator=generator, device=DEVICE) * 6
    positions = torch.randint(50, (tokens,), generator=generator, device=DEVICE)
    slots = torch.randperm(num_blocks * block_size, generator=generator, device=DEVICE)[:tokens]
    slots[tokens - padding :] = -1
    cache = torch.full((num_blocks, 2, 2, num_kv, block_size, dim), 9.0, dtype=dtype, device=DEVICE)
    k_cache, v_cache = cache[:, 1, 0], cache[:, 1, 1]
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    rope_and_store(qkv, *norms, EPS, cos_sin, positions, slots, k_cache, v_cache, *heads)

    exact = original.double().view(tokens, num_heads + 2 * num_kv, dim)
    if has_norms:
        scale = (exact.square().mean(-1, keepdim=True) + EPS).rsqrt()
        exact[:, :num_heads] *= scale[:, :num_heads] * norms[0].double()
        keys = slice(num_heads, num_heads + num_kv)
        exact[:, keys] *= scale[:, keys] * norms[1].double()
    cos, sin = angles.double().cos()[positions][:, None], angles.double().sin()[positions][:, None]
    first, second = exact.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    exact = torch.cat(
        (
            turned[:, : num_heads + num_kv],
            original.double().view(tokens, num_heads + 2 * num_kv, dim)[:, -num_kv:],
        ),
        1,
    )
    assert relative_error(qkv.view(exact.shape), exact) < max_error(dtype)
    by_slot = cache[:, 1].permute(0, 3, 1, 2, 4).reshape(num_blocks * block_size, 2, num_kv, dim)
    stored = slots >= 0
    now = qkv.view(exact.shape)[stored]
    assert torch.equal(by_slot[slots[stored], 0], now[:, num_heads : num_heads + num_kv])
    assert torch.equal(by_slot[slots[stored], 1], now[:, num_heads + num_kv :])
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool, device=DEVICE)
    untouched[slots[stored]] = False
    assert (by_slot[untouched] == 9.0).all() and (cache[:, 0] == 9.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 16), (9, 3, 64), (3, 1, 80)], ids=str)
def test_rope_and_store(heads: tuple[int, int, int], has_norms: bool, dtype: torch.dtype) -> None:
    check(5, heads, dtype, has_norms=has_norms)
    check(0, heads, dtype, has_norms=has_norms)


def test_padding_is_stored_nowhere() -> None:
    check(6, (4, 2, 16), torch.float32, has_norms=True, padding=2)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (4, 1, 256)], ids=str)
def test_large(heads: tuple[int, int, int]) -> None:
    check(2000, heads, torch.bfloat16, has_norms=True, num_blocks=200)
