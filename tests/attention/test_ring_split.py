"""Decodes over 8-bit caches are cut for the waves of the launch that their number gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.attention import triton as backend
from headrace.attention.base import AttentionShape
from headrace.attention.ring_split import RingSplitRule
from headrace.attention.triton_work_list import SplitRule
from headrace.kernels.triton.attention_ring_tiles import ring_wave


@pytest.mark.parametrize(
    ("contexts", "cut"),
    [
        ([32_768], 1024),  # by ``max_splits``
        ([1024], 128),
        ([1024] * 8, 128),
        ([1024] * 16, 256),
        ([1024] * 64, 1024),
        ([20_000] * 8, 2048),  # 640 units; 1024 would be 1,280 in a wave of 1,056
        ([20_000] * 14, 4096),  # 560 units; 2048 would be 1,120
        ([600] * 256, 1024),
        (list(range(100, 2000, 7)), 2048),
        ([300] * 40 + [20_000], 1024),
    ],
)
def test_parts_fill_waves(contexts: list[int], cut: int) -> None:
    spans = np.array(contexts)
    rule = RingSplitRule(8)
    assert rule.short_lengths(spans, rule.short_cut(spans)).max() == cut


@pytest.mark.parametrize("count", [4, 8, 14, 20, 33, 50, 64])
def test_equal_contexts_leave_no_wave_nearly_empty(count: int) -> None:
    spans = np.full(count, 30_000)
    units = 8 * count * -(-30_000 // RingSplitRule(8).short_cut(spans))
    waves = units / ring_wave(8 * count)
    assert waves > 3 or 1.0 + waves - np.ceil(waves) > 0.45


def test_no_tokens() -> None:
    assert RingSplitRule(8).short_cut(np.array([], np.int64)) == RingSplitRule(8).min_short_tokens


@pytest.mark.parametrize(("is_coded", "suits"), [(True, True), (True, False), (False, True)])
def test_only_the_ring_is_planned_for(monkeypatch: pytest.MonkeyPatch, is_coded: bool, suits: bool) -> None:
    monkeypatch.setattr(backend, "suits_ring", lambda *_: suits)
    shape = AttentionShape(32, 8, 128, is_coded=is_coded)
    planner = backend.TritonBackend(shape, torch.device("cpu"))
    assert type(planner._split) is (RingSplitRule if is_coded and suits else SplitRule)


@pytest.mark.parametrize(("is_half", "suits"), [(True, True), (True, False), (False, True)])
def test_long_tiles_are_cut_for_the_kernel_that_takes_them(
    monkeypatch: pytest.MonkeyPatch, is_half: bool, suits: bool
) -> None:
    monkeypatch.setattr(backend, "suits_hopper", lambda *_: suits)
    planner = backend.TritonBackend(AttentionShape(32, 8, 128, is_half=is_half), torch.device("cpu"))
    assert planner._split == SplitRule(8, num_units=132 if is_half and suits else 264)
