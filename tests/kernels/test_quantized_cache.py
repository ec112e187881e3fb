"""KV formats: how close codes come, where they lie, and attention over them."""

from __future__ import annotations

import pytest
import torch

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.errors import ConfigError
from headrace.kernels.quantized_cache import KV_FORMATS, QuantizedCache
from headrace.kernels.reference.rope_and_store import rope_and_store
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for, stored_kv_type

ERROR = {"int8": 0.008, "fp8_e4m3": 0.03, "fp8_e5m2": 0.06, "int4": 0.1}
VALUES = (
    torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
    * torch.logspace(-3, 2, 50)[:, None, None]
)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_error_of_normal_numbers_of_any_size(name: str) -> None:
    form = KV_FORMATS[name]
    codes, words = form.encode(VALUES)
    assert codes.shape == (50, 3, form.code_bytes(64)) and words.shape == (50, 3)
    assert codes.dtype == form.code_dtype and words.dtype == torch.float32
    decoded = form.decode(codes, words)
    error = (decoded - VALUES).norm(dim=-1) / VALUES.norm(dim=-1)
    assert float(error.max()) < 1.35 * ERROR[name] and 0.4 * ERROR[name] < float(error.mean()) < ERROR[name]


@pytest.mark.parametrize("name", KV_FORMATS)
def test_zeros_and_constants_are_exact(name: str) -> None:
    form = KV_FORMATS[name]
    for value in (0.0, 1.0, -2.0):
        decoded = form.decode(*form.encode(torch.full((2, 8), value)))
        torch.testing.assert_close(decoded, torch.full((2, 8), value), rtol=1e-6, atol=0.0)


def cache_of(name: str, num_blocks: int = 5, block_size: int = 4) -> KVCache:
    form = stored_kv_type(name, torch.float32, 8)
    specs: list[KVCacheSpec] = kv_cache_specs_for([None, None], 3, 8, block_size, form)
    layout = KVCacheLayout.for_specs(specs, 3, 8, block_size, form)
    cache = KVCache(specs, layout, num_blocks)
    cache.blocks.fill_(0xFF)
    return cache


def bytes_of_token(name: str) -> int:
    return {"int4": 4}.get(name, 8) + 4


@pytest.mark.parametrize("name", KV_FORMATS)
def test_blocks_hold_codes_and_scales_and_nothing_else(name: str) -> None:
    cache = cache_of(name)
    assert cache.layout.bytes_per_block == 2 * 2 * 3 * 4 * bytes_of_token(name)
    values = torch.randn(2, 2, 4, 3, 8, generator=torch.Generator().manual_seed(1))
    place = torch.arange(4)
    for layer in range(2):
        for part, view in enumerate(cache.layer_views(layer)):
            view.store(values[layer, part], torch.full((4,), 2), place)
    assert not (cache.blocks[2] == 0xFF).all() and (cache.blocks[[0, 1, 3, 4]] == 0xFF).all()
    for layer in range(2):
        for part, view in enumerate(cache.layer_views(layer)):
            found = view.decode_blocks(torch.tensor([2]), torch.float32)[0]
            expected = view.format.decode(*view.format.encode(values[layer, part])).transpose(0, 1)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_copies_take_scales_along(name: str) -> None:
    cache = cache_of(name)
    values = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(2))
    for layer in range(2):
        for view in cache.layer_views(layer):
            view.store(values, torch.full((4,), 1), torch.arange(4))
    cache.copy_blocks(torch.tensor([1, 1]), torch.tensor([3, 0]), torch.tensor([4, 2]))
    assert torch.equal(cache.blocks[3], cache.blocks[1])
    for layer in range(2):
        for view in cache.layer_views(layer):
            whole, part = view.decode_blocks(torch.tensor([1, 0]), torch.float32)
            assert torch.equal(part[:, :2], whole[:, :2])
            assert (view.words[0, :, 2:].view(torch.int32) == -1).all()


def test_rope_and_store_encodes_rotated_keys_and_plain_values() -> None:
    cache = cache_of("int8")
    keys, values = cache.layer_views(1)
    qkv = torch.randn(2, (2 + 2 * 3) * 8, generator=torch.Generator().manual_seed(3))
    cos_sin = torch.randn(6, 8, generator=torch.Generator().manual_seed(4))
    positions, slots = torch.tensor([5, 1]), torch.tensor([4 * 4 + 3, 0])
    rope_and_store(qkv, None, None, 0.0, cos_sin, positions, slots, keys, values, 2, 3, 8)
    heads = qkv.view(2, 8, 8)
    for part, view in ((heads[:, 2:5], keys), (heads[:, 5:], values)):
        found = view.decode_blocks(torch.tensor([4, 0]), torch.float32)
        stored = torch.stack((found[0, :, 3], found[1, :, 0]))
        assert torch.equal(stored, view.format.decode(*view.format.encode(part)))


def test_int4_needs_even_heads() -> None:
    with pytest.raises(ConfigError, match="'int4' needs an even head size, but it is 7"):
        stored_kv_type("int4", torch.float32, 7)
    assert stored_kv_type("auto", torch.bfloat16, 7) == torch.bfloat16
    assert stored_kv_type("float16", torch.bfloat16, 7) == torch.float16
    assert isinstance(cache_of("int4").layer_views(0)[0], QuantizedCache)
