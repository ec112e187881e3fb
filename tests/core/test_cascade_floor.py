"""The floor of ``cascade: auto`` against what was measured with and without cascade."""

from __future__ import annotations

from headrace.config import SharingConfig
from headrace.core.cascade import CascadePlanner
from headrace.core.cascade_floor import DEFAULT_FLOOR, CascadeFloor
from headrace.core.cost_model import CostModel
from headrace.engine.device_defaults import GPU_FLOOR

BLOCK = 16
MEASURED = [
    (8, 256, 16, 0.50),
    (8, 4096, 64, 1.32),
    (8, 4096, 256, 1.08),
    (8, 4096, 1024, 1.08),
    (8, 4096, 4096, 0.83),
    (8, 8192, 1024, 1.37),
    (8, 8192, 4096, 1.08),
    (16, 256, 16, 0.55),
    (16, 1024, 16, 0.87),
    (16, 1024, 64, 0.84),
    (16, 1024, 256, 0.70),
    (16, 1024, 1024, 0.56),
    (16, 1024, 4096, 0.90),
    (16, 4096, 4096, 0.84),
    (16, 8192, 64, 3.01),
    (16, 8192, 4096, 1.25),
    (32, 1024, 16, 1.07),
    (32, 1024, 64, 1.03),
    (32, 1024, 1024, 0.76),
    (32, 4096, 64, 2.88),
    (32, 4096, 4096, 1.26),
    (32, 32768, 1024, 8.37),
    (64, 256, 16, 0.57),
    (64, 256, 64, 0.60),
    (64, 256, 256, 0.69),
    (64, 256, 1024, 0.76),
    (64, 256, 4096, 0.96),
    (64, 1024, 16, 1.12),
    (64, 1024, 64, 1.06),
    (64, 1024, 256, 1.03),
    (64, 8192, 256, 6.01),
    (128, 256, 16, 0.86),
    (128, 256, 64, 0.81),
    (128, 256, 256, 0.85),
    (128, 256, 1024, 0.83),
    (128, 1024, 1024, 1.17),
    (128, 4096, 16, 4.92),
    (128, 32768, 256, 15.20),
    (256, 256, 16, 1.09),
    (256, 256, 1024, 0.87),
    (256, 1024, 1024, 1.26),
    (256, 1024, 4096, 0.94),
    (256, 8192, 16, 13.25),
]
"""(requests, shared tokens, own tokens of each, time apart over time together): of a grid of 200 points measured on one
H200 with ``bench_cascade.py --grid``, those that an earlier floor had wrong, those near the border, and some others."""


def decides(floor: CascadeFloor, batch: int, shared: int, own: int) -> bool:
    planner = CascadePlanner(SharingConfig(), BLOCK, CostModel(), floor)
    return planner._is_worthwhile(list(range(batch)), 0, shared // BLOCK, [shared + own - 1] * batch)


def test_a_gpu_reads_together_only_what_was_measured_to_gain() -> None:
    taken = [gain for *point, gain in MEASURED if decides(GPU_FLOOR, *point)]
    left = [gain for *point, gain in MEASURED if not decides(GPU_FLOOR, *point)]
    assert (len(taken), len(left)) == (20, 23)
    assert min(taken) >= 1.03
    assert max(left) < 1.1


def test_without_a_measured_floor_8192_spared_tokens_are_enough() -> None:
    assert not decides(DEFAULT_FLOOR, 16, 512, 256)
    assert decides(DEFAULT_FLOOR, 17, 512, 256)
    assert decides(DEFAULT_FLOOR, 64, 256, 16)
    assert decides(DEFAULT_FLOOR, 16, 1024, 4096)


def test_what_is_read_together_above_a_span_is_not_its_requests_own() -> None:
    """16 requests, 32,768 tokens in common and 4,096 more that are looked at apart from them, then 64 of their own."""
    planner = CascadePlanner(SharingConfig(), BLOCK, CostModel(), GPU_FLOOR)
    first, end = 32768 // BLOCK, (32768 + 4096) // BLOCK
    for own, expected in ((64, True), (4096, False)):
        starts = [end * BLOCK + own - 1] * 16
        assert planner._is_worthwhile(list(range(16)), first, end, starts) is expected
