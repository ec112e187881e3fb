"""One engine's share of a GPU: what others hold does not count against it, and is not there to be had."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.runtime.gpu_budget import GpuBudget

GIB = 1 << 30
ALONE = GpuBudget(
    total_bytes=100 * GIB,
    start_bytes=99 * GIB,
    free_bytes=79 * GIB,  # weights of 20
    step_bytes=2 * GIB,
    graph_bytes=GIB,
    utilization=0.9,
)


def test_the_share_is_one_engines_whatever_others_hold() -> None:
    assert ALONE.num_bytes == ALONE.share_bytes == (90 - 20 - 2 - 1) * GIB
    half = replace(ALONE, utilization=0.45)
    second = replace(half, start_bytes=54 * GIB, free_bytes=34 * GIB)  # beside one that took its 45
    assert second.num_bytes == half.num_bytes == (45 - 23) * GIB


def test_what_others_hold_is_not_there_to_be_had() -> None:
    beside = replace(ALONE, start_bytes=60 * GIB, free_bytes=40 * GIB)
    assert beside.share_bytes == 67 * GIB
    assert beside.num_bytes == beside.room_bytes == (40 - 3 - 2) * GIB
    assert replace(ALONE, start_bytes=22 * GIB, free_bytes=2 * GIB).num_bytes < 0


@pytest.mark.parametrize(
    ("changes", "kv_gib", "num_fitting", "expected"),
    [
        ({"utilization": 0.2}, 4, 0, "set gpu_memory_utilization to 0.27 (it is 0.2)"),
        ({"utilization": 0.2}, 60, 7, "set gpu_memory_utilization to 0.83 (it is 0.2)"),
        ({}, 90, 512, "set max_model_len to 512 or less"),
        ({"start_bytes": 22 * GIB, "free_bytes": 2 * GIB}, 4, 0, "end what else holds 78.00 GiB there"),
        ({"free_bytes": 2 * GIB}, 4, 0, "set tensor_parallel_size higher"),
    ],
)
def test_the_one_setting_that_helps(
    changes: dict[str, float], kv_gib: int, num_fitting: int, expected: str
) -> None:
    budget = replace(ALONE, **changes)  # type: ignore[arg-type]
    assert budget.num_bytes < kv_gib * GIB
    assert budget.fix(kv_gib * GIB, num_fitting).startswith(expected)


def test_the_share_it_names_is_enough() -> None:
    for kv_gib in range(1, 60):
        fix = replace(ALONE, utilization=0.2).fix(kv_gib * GIB, 0)
        if fix.startswith("set gpu_memory_utilization to "):
            share = float(fix.split()[3])
            assert replace(ALONE, utilization=share).num_bytes >= kv_gib * GIB
