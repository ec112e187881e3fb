"""The reference attention op against dense float64 attention, over caches whose unused slots are NaN."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionPlan
from headrace.attention.plan_buffers import exact_plan
from headrace.attention.reference import ReferenceBackend
from headrace.attention.work_list import Tiling, build_work_list
from headrace.kernels.reference import attention_chunks, attention_items
from headrace.kernels.reference.attention import attention
from tests.attention.paged_cases import PagedCase, make_case, random_lens

CPU = torch.device("cpu")
SMALL = Tiling(tile_rows=8, kv_split_tokens=32, short_rows=1, short_split_tokens=48)
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-6, torch.float16: 5e-6, torch.float64: 1e-13}
"""Of the fp32 output; the oracle takes the inputs as stored, so that only the arithmetic differs."""


def plan_with(case: PagedCase, tiling: Tiling = ReferenceBackend.tiling) -> AttentionPlan:
    return exact_plan(build_work_list(case.metadata, tiling), case.metadata, CPU)


def check(case: PagedCase, tiling: Tiling = ReferenceBackend.tiling) -> torch.Tensor:
    wide = torch.promote_types(torch.float32, case.qkv.dtype)
    out = case.run(plan_with(case, tiling), wide)
    tolerance = TOLERANCE[case.qkv.dtype]
    torch.testing.assert_close(out.double(), case.oracle(), rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 30])
def test_mixed_steps(dtype: torch.dtype, block_size: int, window: int | None) -> None:
    rng = np.random.default_rng(block_size)
    for seed in range(3):
        query_lens, context_lens = random_lens(rng, int(rng.integers(1, 6)), 150)
        case = make_case(
            query_lens, context_lens, block_size=block_size, window=window, dtype=dtype, seed=seed
        )
        check(case, SMALL)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("head_dim", [2, 20, 64, 256])
def test_any_heads(heads: tuple[int, int], head_dim: int) -> None:
    shape = AttentionShape(*heads, head_dim)
    check(make_case([5, 1, 1, 40], [5, 700, 16, 90], shape=shape, seed=head_dim))


@pytest.mark.parametrize("soft_cap", [2.0, 50.0])
@pytest.mark.parametrize("window", [None, 40])
def test_soft_cap(soft_cap: float, window: int | None) -> None:
    case = make_case([1, 30, 1], [70, 90, 600], soft_cap=soft_cap, window=window)
    case.scale *= 5
    check(case, SMALL)
    check(case)


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("query_lens", [[1] * 6, [1, 3, 1, 7, 20, 1]], ids=["decodes", "mixed"])
def test_cascade_equals_separate_reads(window: int | None, query_lens: list[int]) -> None:
    for tiling in (SMALL, ReferenceBackend.tiling):
        prefixes = [([4, 1, 2], 5), ([0, 3], 3)]
        if window is None:
            prefixes = [([4, 1, 2], 3), ([0, 3], 3), ([1, 4], 5, 3)]
        context_lens = [97, 130, 83, 400, 104, 33]
        case = make_case(query_lens, context_lens, window=window, prefix_blocks=prefixes)
        together = plan_with(case, tiling)
        apart = make_case(query_lens, context_lens, window=window, prefix_blocks=prefixes)
        object.__setattr__(apart.metadata, "shared_prefixes", ())
        assert together.num_rows > apart.metadata.query_starts[-1], (
            "rows of prefixes are gathered a second time"
        )
        separate = check(apart, tiling)
        torch.testing.assert_close(check(case, tiling), separate, rtol=1e-5, atol=1e-6)


def test_rows_do_not_depend_on_their_company() -> None:
    """Bit for bit: a request alone, and in a batch with others of all sizes."""
    rng = np.random.default_rng(5)
    query_lens, context_lens = random_lens(rng, 12, 1400)
    query_lens[:6] = [1] * 6
    case = make_case(query_lens, context_lens, block_size=16)
    together = case.run(plan_with(case))
    metadata = case.metadata
    for request in range(len(query_lens)):
        start, stop = metadata.query_starts[request : request + 2]
        alone = PagedCase(
            shape=case.shape,
            metadata=type(metadata)(
                query_starts=np.array([0, stop - start], dtype=np.int32),
                context_lens=metadata.context_lens[request : request + 1],
                block_table=metadata.block_table[request : request + 1],
                block_size=metadata.block_size,
            ),
            qkv=case.qkv[start:stop],
            k_cache=case.k_cache,
            v_cache=case.v_cache,
            keys=[],
            values=[],
            scale=case.scale,
        )
        assert torch.equal(alone.run(plan_with(alone)), together[start:stop]), request


def test_keys_and_values_in_separate_tensors() -> None:
    case = make_case([1, 9, 1], [33, 50, 700])
    joint = check(case)
    case.k_cache, case.v_cache = case.k_cache.clone(), case.v_cache.clone()
    torch.testing.assert_close(check(case), joint, rtol=0, atol=0)
    # values before keys in one allocation
    pair = torch.stack((case.v_cache, case.k_cache), dim=1)
    case.v_cache, case.k_cache = pair[:, 0], pair[:, 1]
    torch.testing.assert_close(check(case), joint, rtol=0, atol=0)


def test_strided_arena_buffers() -> None:
    """Rows of qkv and out may be parts of wider buffers, beginning anywhere."""
    case = make_case([1, 7, 1], [30, 45, 900])
    expected = check(case)
    tokens, width = case.qkv.shape
    wide = torch.full((tokens + 3, width + 4 * case.shape.head_dim), torch.nan)
    wide[2 : tokens + 2, :width] = case.qkv
    case.qkv = wide[2 : tokens + 2, :width]
    plan = plan_with(case)
    out = torch.full((tokens + 3, expected.shape[1] + 2 * case.shape.head_dim), 7.0)
    view = out[1 : tokens + 1, : expected.shape[1]]
    attention(case.qkv, case.k_cache, case.v_cache, plan, view, 4, 2, 16, case.scale)
    torch.testing.assert_close(view, expected, rtol=0, atol=0)
    view.fill_(7.0)
    assert (out == 7.0).all(), "nothing outside the view was written"


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_outputs_are_the_rounded_fp32_result(out_dtype: torch.dtype) -> None:
    for query_lens in ([1, 1], [12, 1]):
        case = make_case(query_lens, [40, 800], dtype=out_dtype)
        wide = check(case)
        assert torch.equal(case.run(plan_with(case), out_dtype), wide.to(out_dtype))


def test_cache_of_another_type_than_the_queries() -> None:
    case = make_case([1, 6], [40, 70], dtype=torch.bfloat16)
    case.qkv = torch.randn(case.qkv.shape)
    check(case)


def test_every_layer_of_a_step_reuses_the_plan() -> None:
    first = make_case([1, 6], [40, 700], layer=0, seed=1)
    second = make_case([1, 6], [40, 700], layer=1, seed=1)
    plan, second.qkv = plan_with(first), first.qkv
    out = first.run(plan)
    expected = out.clone()
    assert torch.equal(second.run(plan, out=out.fill_(torch.nan)), expected)
    assert len(plan.derived) == 1


def test_layers_may_bring_other_activations_of_the_same_shape() -> None:
    case = make_case([1, 6, 1], [40, 700, 33])
    plan = plan_with(case)
    first = case.run(plan)
    expected = first.clone()
    case.qkv = -case.qkv
    turned = case.run(plan)
    assert torch.equal(first, expected) and torch.equal(turned, case.run(plan_with(case)))
    assert not torch.equal(turned, expected)


def test_work_is_freed_with_its_plan() -> None:
    """At once: scratch memory that waits for the garbage collector is fresh memory in each step."""
    case = make_case([1, 6], [40, 700])
    plan = plan_with(case)
    case.run(plan)
    work = weakref.ref(next(iter(plan.derived.values())))
    gc.disable()
    try:
        del plan
        assert work() is None
    finally:
        gc.enable()


def test_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits give many chunks and rebuilt indices, and the same bits."""
    case = make_case([1] * 9 + [30, 8], [50, 60, 70, 80, 90, 55, 65, 75, 85, 100, 60])
    expected = check(case, SMALL)
    monkeypatch.setattr(attention_items, "MAX_CHUNK_BYTES", 60_000)
    monkeypatch.setattr(attention_chunks, "MAX_KEPT_BYTES", 20_000)
    plan = plan_with(case, SMALL)
    out = case.run(plan)
    assert torch.equal(out, expected) and torch.equal(case.run(plan, out=out.fill_(torch.nan)), expected)
    (work,) = plan.derived.values()
    shapes = [chunk.shape for chunk in work]
    assert len(shapes) > 8
    assert all(
        shape.num_items == 1
        or shape.num_items * work.geometry.scratch_elements(shape.num_rows, shape.num_slots) * 4 <= 60_000
        for shape in shapes
    )
    rebuilt = sum(first is not second for first, second in zip(work, work, strict=True))
    assert 0 < rebuilt < len(shapes)


def test_large_scores_do_not_overflow() -> None:
    case = make_case([1, 5], [200, 300])
    case.scale *= 1e3
    out = case.run(plan_with(case, SMALL))
    torch.testing.assert_close(out.double(), case.oracle(), rtol=1e-3, atol=1e-3)


def test_an_empty_step_writes_nothing() -> None:
    case = make_case([1], [5])
    metadata = type(case.metadata)(
        query_starts=np.zeros(2, dtype=np.int32),
        context_lens=np.array([4], dtype=np.int32),
        block_table=case.metadata.block_table,
        block_size=16,
    )
    case.metadata, case.qkv = metadata, case.qkv[:0]
    assert case.run(plan_with(case)).shape == (0, 64)
