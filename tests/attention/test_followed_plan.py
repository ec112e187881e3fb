"""A plan that follows decodes comes to what a plan of their next step would be."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata, AttentionPlan, PrefixGroup
from headrace.attention.native import NativeBackend
from tests.attention.test_work_list import metadata_for

SHAPE = AttentionShape(4, 2, 32)
CPU = torch.device("cpu")


def items_of(plan: AttentionPlan) -> set[tuple[int, ...]]:
    """Items with their rows; their order is no part of what a plan means."""
    names = [field.name for field in fields(AttentionPlan) if field.name.startswith("item_")]
    return set(zip(*(getattr(plan, name).tolist() for name in names), strict=True))


def check_same(plan: AttentionPlan, fresh: AttentionPlan) -> None:
    assert items_of(plan) == items_of(fresh)
    for name in ("query_rows", "row_positions", "reduce_rows", "reduce_starts", "reduce_slots"):
        assert torch.equal(getattr(plan, name), getattr(fresh, name)), name
    assert plan.block_table is fresh.block_table
    for name in ("num_tokens", "num_items", "num_rows", "num_partials", "num_reductions"):
        assert getattr(plan, name) == getattr(fresh, name), name


def decodes(contexts: np.ndarray, prefixes: tuple[PrefixGroup, ...], window: int | None) -> AttentionMetadata:
    return metadata_for(
        [1] * len(contexts), contexts.tolist(), prefixes=prefixes, window=window, block_size=16
    )


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_many_steps_of_the_same_requests(seed: int, is_shared: bool, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    contexts = rng.integers(500, 2100, rng.integers(2, 40))
    members = np.arange(0, len(contexts), 2, dtype=np.int32)
    prefixes = (PrefixGroup(members, 16), PrefixGroup(members[: max(2, len(members) // 2)], 30, 16))
    if not is_shared or len(members) < 2:
        prefixes = ()
    backend = NativeBackend(SHAPE, CPU)
    objects = set()
    for step in range(600):
        metadata = decodes(contexts + step, prefixes, window)
        plan = backend.plan(metadata)
        objects.add(id(plan))
        check_same(plan, NativeBackend(SHAPE, CPU).plan(metadata))
    if window is None:
        assert len(objects) < 300, "plans are made anew where a range is cut, not at every step"


def test_other_steps_are_planned() -> None:
    """Requests that leave, come, change places or are given more tokens; other prefixes; steps left out."""
    rng = np.random.default_rng(0)
    backend = NativeBackend(SHAPE, CPU)
    contexts = rng.integers(50, 400, 8)
    prefixes: tuple[PrefixGroup, ...] = ()
    for _ in range(300):
        contexts = contexts + 1
        query_lens = [1] * len(contexts)
        match rng.integers(0, 8):
            case 0 if len(contexts) > 2:
                contexts = contexts[1:]
            case 1:
                contexts = np.append(contexts, rng.integers(50, 400))
            case 2:
                contexts = contexts[::-1].copy()
            case 3:
                contexts = contexts + 1
            case 4:
                query_lens = rng.integers(0, 4, len(contexts)).tolist()
            case 5:
                members = np.arange(2, dtype=np.int32)
                prefixes = () if prefixes else (PrefixGroup(members, int(rng.integers(1, 3))),)
        query_lens = (query_lens + [1] * 9)[: len(contexts)]
        metadata = metadata_for(query_lens, contexts.tolist(), prefixes=prefixes, block_size=16)
        check_same(backend.plan(metadata), NativeBackend(SHAPE, CPU).plan(metadata))
