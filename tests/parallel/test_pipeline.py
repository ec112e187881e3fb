"""How layers are shared among stages."""

from __future__ import annotations

import pytest

from headrace.parallel.pipeline import PipelineStage


@pytest.mark.parametrize(("num_layers", "num_stages"), [(30, 2), (30, 3), (30, 4), (7, 3), (5, 5), (1, 1)])
def test_stages_hold_every_layer_once(num_layers: int, num_stages: int) -> None:
    parts = [PipelineStage(index, num_stages).layers(num_layers) for index in range(num_stages)]
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_ends() -> None:
    first, middle, last = (PipelineStage(index, 3) for index in range(3))
    assert (first.is_first, middle.is_first, last.is_first) == (True, False, False)
    assert (first.is_last, middle.is_last, last.is_last) == (False, False, True)
    alone = PipelineStage()
    assert alone.is_first and alone.is_last and alone.layers(4) == range(4)
