from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from headrace.attention.base import AttentionShape, PlanLimits, create_backend
from headrace.attention.metadata import PrefixGroup
from headrace.attention.plan_buffers import FIELDS, capacities
from headrace.attention.work_list import Tiling, build_work_list
from headrace.errors import CapacityError, ConfigError
from tests.attention.paged_cases import make_case, random_lens
from tests.attention.test_work_list import metadata_for

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fast'.*reference"):
        create_backend("fast", SHAPE, CPU)


def test_fixed_buffers_never_move_and_give_the_same_results() -> None:
    limits = PlanLimits(max_tokens=64, max_requests=8, max_context_tokens=700)
    fixed = create_backend("reference", SHAPE, CPU, limits)
    exact = create_backend("reference", SHAPE, CPU)
    rng = np.random.default_rng(0)
    addresses = set()
    for seed in range(5):
        query_lens, context_lens = random_lens(rng, 3, 20)
        context_lens[0] += 650
        case = make_case(query_lens, context_lens, shape=SHAPE, seed=seed)
        plan = fixed.plan(case.metadata)
        addresses.add(tuple(getattr(plan, name).data_ptr() for name in FIELDS))
        assert plan.num_partials > 0
        torch.testing.assert_close(case.run(plan), case.run(exact.plan(case.metadata)), rtol=0, atol=0)
    assert len(addresses) == 1


def test_exact_plans_are_as_long_as_their_counts() -> None:
    case = make_case([3, 1], [40, 900])
    plan = create_backend("reference", SHAPE, CPU).plan(case.metadata)
    assert plan.num_tokens == 4
    assert len(plan.item_request) == plan.num_items == 3
    assert len(plan.query_rows) == plan.num_rows == 4
    assert len(plan.reduce_slots) == plan.num_partials == 2
    assert len(plan.reduce_rows) == plan.num_reductions == 1


def test_too_large_a_step_is_refused_and_leaves_the_buffers_alone() -> None:
    backend = create_backend("reference", SHAPE, CPU, PlanLimits(4, 2, 64))
    small = make_case([1, 2], [20, 30])
    plan = backend.plan(small.metadata)
    before = {name: getattr(plan, name).clone() for name in FIELDS}
    with pytest.raises(CapacityError, match="query_rows"):
        backend.plan(make_case([17], [40]).metadata)
    assert all(torch.equal(before[name], getattr(plan, name)) for name in FIELDS)


@pytest.mark.parametrize("window", [None, 50])
def test_capacities_hold_any_step_within_the_limits(window: int | None) -> None:
    tiling = Tiling(tile_rows=4, kv_split_tokens=16, short_rows=1, short_split_tokens=32)
    rng = np.random.default_rng(4)
    for _ in range(60):
        requests = int(rng.integers(1, 9))
        query_lens = [int(rng.integers(0, 7)) for _ in range(requests)]
        limits = PlanLimits(max(1, sum(query_lens)), requests, 130)
        context_lens = [130 if rng.random() < 0.7 else query + 61 for query in query_lens]
        members = rng.permutation(requests).astype(np.int32)
        pairs = [members[at : at + 2] for at in range(0, requests - 1, 2)]
        prefixes = tuple(PrefixGroup(pair, int(rng.integers(1, 16))) for pair in pairs)
        if requests > 3:  # a second level for the first pair, and a first level for all
            outer = PrefixGroup(members, 3)
            prefixes = (outer, *(PrefixGroup(pair, int(rng.integers(4, 16)), 3) for pair in pairs))
        metadata = metadata_for(query_lens, context_lens, window=window, prefixes=prefixes)
        work = build_work_list(metadata, tiling)
        room = capacities(limits, tiling)
        for field in dataclasses.fields(work):
            assert len(getattr(work, field.name)) <= room[field.name], field.name
