"""The floor of ``cascade: auto`` against what was measured with and without cascade."""

from __future__ import annotations

from headrace.config import SharingConfig
from headrace.core.cascade import CascadePlanner
from headrace.core.cascade_floor import DEFAULT_FLOOR, CascadeFloor
from headrace.core.cost_model import CostModel
from headrace.engine.device_defaults import GPU_CASCADE_REQUESTS, GPU_FLOOR

BLOCK = 16
MEASURED = [
    (2, 256, 4096, 1.00),
    (2, 8192, 16, 1.27),
    (2, 8192, 64, 1.28),
    (2, 8192, 256, 1.25),
    (2, 8192, 1024, 1.01),
    (2, 8192, 4096, 0.99),
    (4, 4096, 64, 1.33),
    (4, 4096, 1024, 1.34),
    (4, 8192, 64, 1.45),
    (4, 8192, 256, 1.78),
    (4, 8192, 1024, 1.79),
    (4, 8192, 4096, 1.73),
    (8, 256, 16, 0.79),
    (8, 1024, 64, 1.13),
    (8, 1024, 1024, 1.03),
    (8, 4096, 1024, 2.22),
    (16, 1024, 16, 1.55),
    (16, 1024, 64, 1.43),
    (16, 1024, 256, 1.99),
    (16, 1024, 1024, 0.97),
    (16, 1024, 4096, 1.24),
    (16, 4096, 4096, 1.29),
    (32, 256, 64, 1.10),
    (32, 1024, 16, 2.44),
    (32, 1024, 64, 2.17),
    (32, 1024, 256, 2.17),
    (32, 1024, 4096, 1.11),
    (32, 32768, 1024, 10.77),
    (64, 256, 64, 1.17),
    (64, 256, 1024, 0.88),
    (64, 1024, 1024, 1.29),
    (64, 1024, 4096, 1.23),
    (64, 8192, 256, 8.18),
    (128, 256, 16, 1.25),
    (128, 256, 256, 0.97),
    (128, 256, 1024, 0.99),
    (128, 1024, 4096, 1.05),
    (128, 32768, 256, 17.13),
    (256, 256, 16, 1.44),
    (256, 256, 64, 1.30),
    (256, 256, 256, 1.13),
    (256, 256, 4096, 0.98),
    (256, 1024, 1024, 1.32),
    (256, 8192, 16, 14.29),
]
"""(requests, shared tokens, own tokens of each, time apart over time together): of a grid of 200 points measured on one
H200 with ``bench_cascade.py --grid``, those near the border and some others."""


def decides(floor: CascadeFloor, batch: int, shared: int, own: int) -> bool:
    sharing = SharingConfig(cascade_min_requests=GPU_CASCADE_REQUESTS)
    planner = CascadePlanner(sharing, BLOCK, CostModel(), floor)
    return planner._is_worthwhile(list(range(batch)), 0, shared // BLOCK, [shared + own - 1] * batch)


def test_a_gpu_reads_together_only_what_was_measured_to_gain() -> None:
    taken = [gain for *point, gain in MEASURED if decides(GPU_FLOOR, *point)]
    left = [gain for *point, gain in MEASURED if not decides(GPU_FLOOR, *point)]
    assert (len(taken), len(left)) == (24, 20)
    assert min(taken) >= 1.02
    assert max(left) < 1.5


def test_without_a_measured_floor_8192_spared_tokens_are_enough() -> None:
    assert not decides(DEFAULT_FLOOR, 16, 512, 256)
    assert decides(DEFAULT_FLOOR, 17, 512, 256)
    assert decides(DEFAULT_FLOOR, 64, 256, 16)
    assert decides(DEFAULT_FLOOR, 16, 1024, 4096)


def test_what_is_read_together_above_a_span_is_not_its_requests_own() -> None:
    """16 requests, 32,768 tokens in common and 4,096 more that are looked at apart from them, then 64 of their own."""
    planner = CascadePlanner(SharingConfig(), BLOCK, CostModel(), GPU_FLOOR)
    first, end = 32768 // BLOCK, (32768 + 4096) // BLOCK
    for own, expected in ((64, True), (16384, False)):
        starts = [end * BLOCK + own - 1] * 16
        assert planner._is_worthwhile(list(range(16)), first, end, starts) is expected
