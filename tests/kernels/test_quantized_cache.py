"""KV formats: how close codes come, where they lie, and attention over them."""

from __future__ import annotations

import pytest
import torch

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.errors import ConfigError
from headrace.kernels.quantized_cache import KV_FORMATS, KVFormat, QuantizedCache, hadamard
from headrace.kernels.reference.rope_and_store import rope_and_store
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for, stored_kv_type

ERROR = {"int8": 0.008, "fp8_e4m3": 0.03, "fp8_e5m2": 0.06, "int4": 0.1, "int5": 0.048}
FORMATS = {form.name: form for forms in KV_FORMATS.values() for form in (forms.keys, forms.values)}
VALUES = (
    torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
    * torch.logspace(-3, 2, 50)[:, None, None]
)


def test_every_format_is_tried() -> None:
    assert set(FORMATS) == set(ERROR)


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_error_of_normal_numbers_of_any_size(form: KVFormat) -> None:
    name = form.name
    codes, words = form.encode(VALUES)
    assert codes.shape == (50, 3, form.code_bytes(64)) and words.shape == (50, 3)
    assert codes.dtype == form.code_dtype and words.dtype == torch.float32
    decoded = form.decode(codes, words)
    error = (decoded - VALUES).norm(dim=-1) / VALUES.norm(dim=-1)
    assert float(error.max()) < 1.35 * ERROR[name] and 0.4 * ERROR[name] < float(error.mean()) < ERROR[name]


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_scale_words_of_one_head_among_others(form: KVFormat) -> None:
    codes, words = form.encode(VALUES)
    words = words.T.contiguous().T  # one column of which is contiguous, with a stride
    assert torch.equal(form.decode(codes[:, 1:2], words[:, 1:2]), form.decode(codes, words)[:, 1:2])


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_zeros_and_constants_are_exact(form: KVFormat) -> None:
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


@pytest.mark.parametrize("name", ["int4", "int5"])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 256])
def test_packed_codes_come_back_as_they_were(name: str, head_dim: int) -> None:
    form = FORMATS[name]
    codes = torch.randint(0, 1 << form.bits, (7, head_dim), generator=torch.Generator().manual_seed(1))
    codes[:, 0], codes[:, -1] = 0, (1 << form.bits) - 1  # so that the scale is 1
    packed, words = form.encode(codes)
    assert packed.shape == (7, head_dim * form.bits // 8)
    assert torch.equal(form.decode(packed, words), codes.float())


@pytest.mark.parametrize("head_dim", [8, 22, 64, 80, 96, 128, 256])
def test_hadamard_keeps_products_and_is_its_own_inverse(head_dim: int) -> None:
    keys, queries = torch.randn(2, 5, head_dim, generator=torch.Generator().manual_seed(2))
    turned = hadamard(keys)
    torch.testing.assert_close(turned @ hadamard(queries).T, keys @ queries.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(turned), keys)
    peak = hadamard(torch.eye(head_dim)[3] * 8).abs()
    spread = 2 * (head_dim // 2 & -(head_dim // 2))  # channels that share what was in one
    assert int((peak > 1e-6).sum()) == spread and float(peak.max()) == pytest.approx(8 * spread**-0.5)


def bytes_of_token(name: str) -> int:
    """A key and a value of a head of 8."""
    return 8 + {"int4": 5 + 4}.get(name, 16)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_blocks_hold_codes_and_scales_and_nothing_else(name: str) -> None:
    cache = cache_of(name)
    assert cache.layout.bytes_per_block == 2 * 3 * 4 * bytes_of_token(name)
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


def test_turned_keys_are_met_by_turned_queries() -> None:
    """Products are those of a plain cache, but for the rounding, also where one channel is much larger than others."""
    qkv = torch.randn(4, (2 + 2 * 3) * 8, generator=torch.Generator().manual_seed(3))
    qkv.view(4, 8, 8)[:, 2:5, 1] += 30.0
    cos_sin = torch.cat((torch.ones(4, 4), torch.zeros(4, 4)), dim=1)
    numbers = torch.arange(4)
    products = []
    for name in ("int8", "int4"):
        cache, turned = cache_of(name), qkv.clone()
        keys, values = cache.layer_views(0)
        rope_and_store(turned, None, None, 0.0, cos_sin, numbers, numbers, keys, values, 2, 3, 8)
        stored = keys.decode_blocks(torch.tensor([0]), torch.float32)[0]
        products.append(torch.einsum("qhd,ktd->qhkt", turned.view(4, 8, 8)[:, :2], stored))
        assert torch.equal(turned.view(4, 8, 8)[:, 5:], qkv.view(4, 8, 8)[:, 5:]), "values stay"
    assert float((products[1] - products[0]).norm() / products[0].norm()) < 0.05


def test_int4_needs_heads_that_fill_bytes() -> None:
    with pytest.raises(ConfigError, match="'int4' needs a head size that is a multiple of 8, but it is 20"):
        stored_kv_type("int4", torch.float32, 20)
    assert stored_kv_type("auto", torch.bfloat16, 7) == torch.bfloat16
    assert stored_kv_type("float16", torch.bfloat16, 7) == torch.float16
    assert isinstance(cache_of("int4").layer_views(0)[0], QuantizedCache)
