from __future__ import annotations

import pytest
import torch

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.errors import ConfigError
from headrace.parallel.pipeline import PipelineStage
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for

HEADS, DIM, BLOCK = 2, 8, 4


def make_cache(windows: list[int | None], dtype: torch.dtype = torch.bfloat16) -> KVCache:
    specs = kv_cache_specs_for(windows, HEADS, DIM, BLOCK, dtype)
    return KVCache(specs, KVCacheLayout.for_specs(specs, HEADS, DIM, BLOCK, dtype), num_blocks=6)


def test_specs_of_a_model_with_one_kind_of_layers() -> None:
    (spec,) = kv_cache_specs_for([None] * 30, 3, 64, 16, torch.float32)
    assert spec.kind == "full" and spec.window is None
    assert spec.layer_ids == tuple(range(30))
    assert spec.bytes_per_block == 30 * 2 * 3 * 16 * 64 * 4


def test_specs_of_a_hybrid_model_have_blocks_of_one_size() -> None:
    windows = [None if layer % 6 == 5 else 512 for layer in range(18)]
    specs = kv_cache_specs_for(windows, 1, 256, 16, torch.bfloat16)
    assert len(specs) == 6
    assert {spec.bytes_per_block for spec in specs} == {3 * 2 * 16 * 256 * 2}
    assert [spec.kind for spec in specs].count("sliding") == 5
    assert all(spec.window == (512 if spec.kind == "sliding" else None) for spec in specs)
    assert sorted(layer for spec in specs for layer in spec.layer_ids) == list(range(18))


def test_layer_views_are_the_documented_bytes_of_a_block() -> None:
    cache = make_cache([None, None, 8, 8, 8])
    layout = cache.layout
    assert layout.num_layers == 2 and layout.num_planes == 2 * 2 * HEADS
    for layer, (group, index) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]):
        assert cache.layer_group(layer) == group
        cache.blocks.zero_()
        keys, values = cache.layer_views(layer)
        assert keys.shape == values.shape == (6, HEADS, BLOCK, DIM)
        keys[3, 1, 2] = 1.0
        values[3, 1, 2] = 2.0
        layer_bytes = layout.bytes_per_block // layout.num_layers
        block = (
            cache.block_bytes(3)[index * layer_bytes : (index + 1) * layer_bytes]
            .view(torch.bfloat16)
            .view(2, HEADS, BLOCK, DIM)
        )
        assert (block[0, 1, 2] == 1.0).all() and (block[1, 1, 2] == 2.0).all()
        assert int(cache.blocks.count_nonzero()) == int(block.view(torch.uint8).count_nonzero())
        assert int(block.count_nonzero()) == 2 * DIM


def test_copy_blocks_copies_every_layer_of_the_group() -> None:
    cache = make_cache([None, None])
    for layer in range(2):
        keys, values = cache.layer_views(layer)
        keys[0], values[0], keys[4], values[4] = 1.0 + layer, 3.0 + layer, 9.0, 9.0
    cache.copy_blocks(torch.tensor([0]), torch.tensor([4]), torch.tensor([3]))
    for layer in range(2):
        keys, values = cache.layer_views(layer)
        assert (keys[4, :, :3] == 1.0 + layer).all() and (keys[4, :, 3] == 9.0).all()
        assert (values[4, :, :3] == 3.0 + layer).all() and (values[4, :, 3] == 9.0).all()


def test_copy_blocks_runs_the_op_of_the_device() -> None:
    calls = []
    specs = kv_cache_specs_for([None], HEADS, DIM, BLOCK, torch.float32)
    layout = KVCacheLayout.for_specs(specs, HEADS, DIM, BLOCK, torch.float32)
    cache = KVCache(specs, layout, 2, copy_op=lambda *args: calls.append(args))
    copies = torch.tensor([0]), torch.tensor([1]), torch.tensor([4])
    cache.copy_blocks(*copies)
    assert calls == [(cache.blocks, *copies, layout)]


def test_a_group_that_does_not_fit_the_layout_is_refused() -> None:
    layout = KVCacheLayout(2, HEADS, BLOCK, DIM, torch.float32)
    spec = KVCacheSpec(kind="full", layer_ids=(0, 1), bytes_per_block=layout.bytes_per_block + 4)
    with pytest.raises(ConfigError, match=r"\(0, 1\)"):
        KVCache([spec], layout, 3)


@pytest.mark.parametrize("num_blocks", [1 << 40, 1 << 56])
def test_blocks_beyond_all_memory_are_refused(num_blocks: int) -> None:
    specs = kv_cache_specs_for([None], HEADS, DIM, BLOCK, torch.float32)
    layout = KVCacheLayout.for_specs(specs, HEADS, DIM, BLOCK, torch.float32)
    with pytest.raises(
        ConfigError, match=f"{num_blocks * layout.bytes_per_block} bytes in all; lower num_kv_blocks"
    ):
        KVCache(specs, layout, num_blocks)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_of_a_pipeline_have_the_same_groups_over_their_own_layers(num_stages: int) -> None:
    windows = ((8,) * 5 + (None,)) * 3
    whole = kv_cache_specs_for(windows, 2, 16, 4, torch.float32)
    held: list[int] = []
    for index in range(num_stages):
        layers = PipelineStage(index, num_stages).layers(len(windows))
        specs = kv_cache_specs_for(windows, 2, 16, 4, torch.float32, layers)
        assert [(spec.kind, spec.window) for spec in specs] == [(spec.kind, spec.window) for spec in whole]
        assert len({(spec.bytes_per_block, len(spec.layer_ids)) for spec in specs}) == 1
        assert specs[0].bytes_per_block < whole[0].bytes_per_block or num_stages == 2
        for spec in specs:
            ids = [layer for layer in spec.layer_ids if layer >= 0]
            assert all(windows[layer] == spec.window and layer in layers for layer in ids)
            held += ids
        layout = KVCacheLayout.for_specs(specs, 2, 16, 4, torch.float32)
        KVCache(specs, layout, 3)
    assert sorted(held) == list(range(len(windows)))


def test_a_single_stage_has_the_groups_of_the_whole() -> None:
    windows = (8, None, 8)
    whole = kv_cache_specs_for(windows, 2, 16, 4, torch.float32)
    assert kv_cache_specs_for(windows, 2, 16, 4, torch.float32, range(3)) == whole
