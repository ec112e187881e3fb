"""Which launch the kernel with a ring gets, and where it is taken."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from headrace.kernels.triton import attention_ring_tiles as tiles
from headrace.kernels.triton.attention_ring_tiles import WARM_UNITS, ring_launch, ring_wave, takes_ring
from headrace.runtime.cuda_graph import BUCKETS

SHAPE = {
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "block_size": 16,
    "k_plane_codes": 16 * 132,
    "v_plane_codes": 16 * 132,
    "has_soft_cap": False,
}


@pytest.mark.parametrize(
    ("row_units", "num_warps"),
    [(1, 4), (8, 4), (16, 4), (17, 1), (64, 1), (256, 1), (257, 2), (512, 2), (513, 1), (4096, 1)],
)
def test_warps_of_a_unit(row_units: int, num_warps: int) -> None:
    """As measured with 8 KV heads: four for one request, two for 64, one for 256."""
    launch = ring_launch(row_units)
    assert launch.num_warps == num_warps
    assert ring_wave(row_units) * num_warps == 132 * 8


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_a_graph_has_the_launch_that_its_steps_were_planned_for(num_kv_heads: int) -> None:
    for count in range(1, 512):
        bucket = next(size for size in BUCKETS if size >= count)
        assert ring_launch(count * num_kv_heads) == ring_launch(bucket * num_kv_heads)


def test_programs_of_one_warp_all_run() -> None:
    """Registers belong to a quarter of a multiprocessor: ten programs told to share them would run as eight."""
    for units in WARM_UNITS:
        launch = ring_launch(units)
        assert launch.programs_per_multiprocessor * launch.num_warps % 4 == 0


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 5, 8, 16, 32, 128])
def test_the_warm_up_meets_every_launch(num_kv_heads: int) -> None:
    def launches(units: Any) -> set[Any]:
        return {ring_launch(-(-count // num_kv_heads) * num_kv_heads) for count in units}

    assert launches(range(1, 3000)) == launches(WARM_UNITS)


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({}, True),
        ({"head_dim": 64}, False),
        ({"has_soft_cap": True}, False),
        ({"block_size": 8}, False),
        ({"num_heads": 256}, False),
        ({"v_plane_codes": 16 * 132 + 4}, False),
    ],
    ids=str,
)
def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], is_taken: bool) -> None:
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(tiles, "architecture", lambda: 90)
    assert takes_ring(SHAPE | change) == is_taken
    monkeypatch.setattr(tiles, "architecture", lambda: 80)
    assert not takes_ring(SHAPE | change)


def test_the_interpreter_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "INTERPRETED", True)
    assert not takes_ring(SHAPE)
