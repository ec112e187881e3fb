"""Native attention and rope_and_store over quantized caches, against the oracle and the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.attention.base import AttentionShape, create_backend
from headrace.kernels.native.attention import attention
from headrace.kernels.native.rope_and_store import rope_and_store
from headrace.kernels.quantized_cache import KV_FORMATS
from headrace.kernels.reference.rope_and_store import rope_and_store as reference
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for
from tests.kernels.paged_step import make_step, quantized

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("head_dim", [16, 24, 80])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_attention(name: str, head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    step = make_step([1, 1, 40, 7], [1, 70, 40, 90], shape, "cpu", dtype, window=window)
    meant, keys, values = quantized(step, name)
    out = torch.full((len(step.qkv), 4 * head_dim), torch.nan)
    plan = create_backend("reference", shape, torch.device("cpu")).plan(step.metadata)
    attention(step.qkv, keys, values, plan, out, 4, 2, head_dim, step.scale, step.soft_cap)
    torch.testing.assert_close(out.double(), meant.oracle(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 24, 80])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_rope_and_store_writes_the_references_bytes(name: str, head_dim: int, dtype: torch.dtype) -> None:
    forms = KV_FORMATS[name]
    specs = kv_cache_specs_for([None], 3, head_dim, 4, forms)
    layout = KVCacheLayout.for_specs(specs, 3, head_dim, 4, forms)
    caches = [KVCache(specs, layout, 5) for _ in range(2)]
    for cache in caches:
        cache.blocks.fill_(7)
    generator = torch.Generator().manual_seed(0)
    qkv = (torch.randn(6, 10 * head_dim, generator=generator) * torch.logspace(-4, 2, 6)[:, None]).to(dtype)
    qkv[3] = 0.0
    # angles that leave numbers as they are or turn their sign: nothing to round before they are stored
    cos_sin = torch.zeros(8, head_dim)
    cos_sin[:, : head_dim // 2] = torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    positions, slots = torch.arange(6), torch.tensor([0, 5, 19, 8, 2, 11])
    tensors = qkv.clone(), qkv.clone()
    for op, cache, tensor in zip((rope_and_store, reference), caches, tensors, strict=True):
        op(tensor, None, None, 0.0, cos_sin, positions, slots, *cache.layer_views(0), 4, 3, head_dim)
    assert torch.equal(caches[0].blocks, caches[1].blocks) and torch.equal(*tensors)
