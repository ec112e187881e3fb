"""Triton attention and rope_and_store over quantized caches, against the oracle and the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import headrace.kernels.triton.attention as attention_op
from headrace.attention.base import AttentionShape, PlanLimits
from headrace.attention.triton import TritonBackend
from headrace.kernels.quantized_cache import KV_FORMATS
from headrace.kernels.reference.rope_and_store import rope_and_store as reference
from headrace.kernels.triton.attention import attention
from headrace.kernels.triton.attention_ring_tiles import WARM_UNITS, ring_launch
from headrace.kernels.triton.attention_tiles import LaunchShape
from headrace.kernels.triton.rope_and_store import rope_and_store
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for
from tests.kernels.paged_step import make_step, quantized
from tests.kernels.test_triton_attention import FineBackend
from tests.kernels.triton_setup import DEVICE, HALF, HAS_GPU, max_error, relative_error

INTERPRETED_ERROR = {"int8": 0.01, "int4": 0.01, "fp8_e4m3": 0.06, "fp8_e5m2": 0.12}
"""The interpreter cuts numbers off where a GPU rounds them to fp8."""

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_attention(name: str, dtype: torch.dtype) -> None:
    """Short and long tiles, splits and their merging."""
    step = make_step([1, 1, 40, 0], [1, 70, 75, 5], SHAPE, DEVICE, dtype)
    meant, keys, values = quantized(step, name)
    out = torch.full((len(step.qkv), 64), torch.nan, dtype=dtype, device=DEVICE)
    plan = FineBackend(SHAPE).plan(step.metadata)
    attention(step.qkv, keys, values, plan, out, 4, 2, 16, step.scale, step.soft_cap)
    assert relative_error(out, meant.oracle()) < 2 * max_error(dtype)


@pytest.mark.parametrize("options", [{}, {"window": 19}, {"soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_decodes_over_words_of_codes(name: str, head_dim: int, options: dict[str, Any]) -> None:
    """Several rows a tile, ranges that end inside a block and inside a round, splits."""
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    step = make_step([1, 1, 3, 1], [1, 70, 75, 130], shape, DEVICE, HALF, **options)
    meant, keys, values = quantized(step, name)
    out = torch.full((len(step.qkv), 4 * head_dim), torch.nan, dtype=HALF, device=DEVICE)
    plan = FineBackend(shape).plan(step.metadata)
    attention(step.qkv, keys, values, plan, out, 4, 2, head_dim, step.scale, step.soft_cap)
    assert relative_error(out, meant.oracle()) < 2 * max_error(HALF)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "launch", [ring_launch(units) for units in WARM_UNITS], ids=lambda launch: f"{launch.num_warps} warps"
)
@pytest.mark.parametrize(
    ("heads", "block_size", "window"),
    [((32, 8), 16, None), ((16, 1), 16, 70), ((4, 2), 32, None), ((4, 2), 32, 19)],
)
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_decodes_by_the_ring(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    launch: LaunchShape,
) -> None:
    """All launches: rounds that end inside a block, rings that go round, several rows a tile, splits and none, and
    queries far outside of fp16."""
    taken: list[int] = []
    monkeypatch.setattr(attention_op, "ring_launch", lambda units: taken.append(units) or launch)
    shape = AttentionShape(*heads, head_dim=128, is_coded=True)
    step = make_step(
        [1, 1, 3, 1, 1], [1, 70, 75, 1300, 520], shape, DEVICE, HALF, block_size=block_size, window=window
    )
    step = replace(step, qkv=step.qkv * 2.0**20, scale=step.scale * 2.0**-20)
    meant, keys, values = quantized(step, name)
    for planner in (FineBackend(shape), TritonBackend(shape, DEVICE)):
        out = torch.full((len(step.qkv), heads[0] * 128), torch.nan, dtype=HALF, device=DEVICE)
        attention(step.qkv, keys, values, planner.plan(step.metadata), out, *heads, 128, step.scale, None)
        assert relative_error(out, meant.oracle()) < 2 * max_error(HALF)
    assert len(taken) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4, 50, 150])
def test_decodes_in_a_refilled_plan(count: int) -> None:
    """The launch and the cut of so many requests, in the buffer that graphs read."""
    shape = AttentionShape(32, 8, 128, is_coded=True)
    limits = PlanLimits(256, 256, 4096)
    planner = TritonBackend(shape, DEVICE, limits)
    for length in (900, 33):
        contexts = [length + 7 * index % 90 for index in range(count)]
        step = make_step([1] * count, contexts, shape, DEVICE, HALF)
        meant, keys, values = quantized(step, "fp8_e4m3")
        out = torch.full((count, 4096), torch.nan, dtype=HALF, device=DEVICE)
        attention(step.qkv, keys, values, planner.plan(step.metadata), out, 32, 8, 128, step.scale, None)
        assert relative_error(out, meant.oracle()) < 2 * max_error(HALF)


def cache(name: str, head_dim: int) -> KVCache:
    forms = KV_FORMATS[name]
    specs = kv_cache_specs_for([None], 3, head_dim, 16, forms)
    made = KVCache(specs, KVCacheLayout.for_specs(specs, 3, head_dim, 16, forms), 4, DEVICE)
    made.blocks.zero_()
    return made


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_rope_and_store(name: str, has_norm: bool, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, (4 + 6) * head_dim, generator=generator).to(DEVICE)
    qkv[3] = 0.0
    cos_sin = torch.randn(40, head_dim, generator=generator).to(DEVICE)
    norm = torch.rand(head_dim, generator=generator).to(DEVICE) + 0.5 if has_norm else None
    positions = torch.tensor([3, 4, 39, 0, 7], device=DEVICE)
    slots = torch.tensor([17, 18, 63, 0, 5], device=DEVICE)
    found, expected = cache(name, head_dim), cache(name, head_dim)
    turned = qkv.clone()
    arguments = (norm, norm, 1e-6, cos_sin, positions, slots)
    rope_and_store(turned, *arguments, *found.layer_views(0), 4, 3, head_dim)
    reference(qkv, *arguments, *expected.layer_views(0), 4, 3, head_dim)
    assert relative_error(turned, qkv) < 1e-6
    every = torch.arange(4, device=DEVICE)
    for ours, theirs in zip(found.layer_views(0), expected.layer_views(0), strict=True):
        # a number between two codes may go either way
        error = relative_error(
            ours.decode_blocks(every, torch.float32), theirs.decode_blocks(every, torch.float32)
        )
        assert error < (0.01 if HAS_GPU else INTERPRETED_ERROR[name])
        written = theirs.words != 0  # int4 may have a minimum of -0
        assert torch.equal(ours.words != 0, written)


def test_padding_is_stored_nowhere() -> None:
    made = cache("int8", 16)
    qkv, cos_sin = torch.ones(1, 160, device=DEVICE), torch.ones(1, 16, device=DEVICE)
    zero, slot = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.tensor([-1], device=DEVICE)
    rope_and_store(qkv, None, None, 0.0, cos_sin, zero, slot, *made.layer_views(0), 4, 3, 16)
    assert not made.blocks.any()
