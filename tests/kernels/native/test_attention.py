"""Native attention against dense float64 attention, over caches whose unused slots are NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.attention.native import NativeBackend
from headrace.attention.plan_buffers import exact_plan
from headrace.attention.work_list import Tiling, build_work_list
from headrace.kernels.native.attention import attention
from headrace.kernels.native.library import NativeLibrary, load_library
from tests.attention.paged_cases import PagedCase, make_case, random_lens
from tests.kernels.native.guarded import guarded

SMALL = Tiling(tile_rows=8, kv_split_tokens=32, short_rows=1, short_split_tokens=48)
TYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


def plan_with(case: PagedCase, tiling: Tiling) -> AttentionPlan:
    work = build_work_list(case.metadata, tiling)
    return exact_plan(work, case.metadata, torch.device("cpu"))


def run(case: PagedCase, plan: AttentionPlan, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = case.shape
    out = guarded(len(case.qkv), shape.num_heads * shape.head_dim, dtype)
    sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    attention(case.qkv, case.k_cache, case.v_cache, plan, out.view, *sizes, case.scale, case.soft_cap)
    result = out.view.clone()
    out.check()
    return result


def check(case: PagedCase, tiling: Tiling = NativeBackend.tiling, tolerance: float = 5e-6) -> torch.Tensor:
    library = load_library()
    if isinstance(library, NativeLibrary) and library.instruction_set == "amx":
        # Numbers are two bf16 digits; the softmax's weights one, as exact as bf16 answers are, where all else is bf16.
        tolerance = max(tolerance, 4e-3 if case.qkv.dtype == torch.bfloat16 else 4e-5)
    out = run(case, plan_with(case, tiling))
    torch.testing.assert_close(out.double(), case.oracle(), rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("dtype", TYPES, ids=str)
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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("window", [None, 33])
def test_chunks_of_prompts(dtype: torch.dtype, heads: tuple[int, int], window: int | None) -> None:
    """Numbers of queries and keys around those of whole tiles."""
    shape = AttentionShape(*heads, 96)
    check(
        make_case(
            [16, 17, 31, 65, 33], [16, 50, 95, 65, 161], shape=shape, window=window, dtype=dtype, seed=3
        )
    )


@pytest.mark.parametrize("soft_cap", [2.0, 50.0])
@pytest.mark.parametrize("window", [None, 40])
def test_soft_cap(soft_cap: float, window: int | None) -> None:
    case = make_case([1, 30, 1], [70, 90, 600], soft_cap=soft_cap, window=window)
    case.scale *= 5
    check(case, SMALL, 3e-5)
    check(case, tolerance=3e-5)


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("query_lens", [[1] * 6, [1, 3, 1, 7, 20, 1]], ids=["decodes", "mixed"])
def test_cascade(window: int | None, query_lens: list[int]) -> None:
    for tiling in (SMALL, NativeBackend.tiling):
        prefixes = [([4, 1, 2], 5), ([0, 3], 3)]
        check(
            make_case(query_lens, [97, 130, 83, 400, 104, 33], window=window, prefix_blocks=prefixes), tiling
        )


def test_rows_do_not_depend_on_their_company() -> None:
    """Bit for bit: a request alone, and in a batch with others of all sizes."""
    query_lens, context_lens = random_lens(np.random.default_rng(5), 8, 1400)
    query_lens[:4] = [1] * 4
    case = make_case(query_lens, context_lens)
    together = run(case, plan_with(case, NativeBackend.tiling))
    metadata = case.metadata
    for request in range(len(query_lens)):
        start, stop = metadata.query_starts[request : request + 2]
        alone = AttentionMetadata(
            query_starts=np.array([0, stop - start], dtype=np.int32),
            context_lens=metadata.context_lens[request : request + 1],
            block_table=metadata.block_table[request : request + 1],
            block_size=metadata.block_size,
        )
        own = PagedCase(
            case.shape, alone, case.qkv[start:stop], case.k_cache, case.v_cache, [], [], case.scale
        )
        assert torch.equal(run(own, plan_with(own, NativeBackend.tiling)), together[start:stop]), request


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompts_rows_do_not_depend_on_how_many_come_at_once(
    instruction_set: str, out_dtype: torch.dtype
) -> None:
    """Bit for bit, from two rows on, in bf16: whatever part of a prompt a cache holds, the rest is the same."""
    if instruction_set != "amx":
        pytest.skip("where tiles are not, answers of one row and of several differ in their order of sums")
    for context in (60, 700, 1300):
        shape = AttentionShape(9, 3, 64)
        whole = make_case([56], [context], shape=shape, dtype=torch.bfloat16, seed=context)
        together = run(whole, plan_with(whole, NativeBackend.tiling), out_dtype)
        for rows in (2, 3, 5, 6, 17, 33):
            rest = replace(whole.metadata, query_starts=np.array([0, rows], np.int32))
            part = replace(whole, metadata=rest, qkv=whole.qkv[-rows:])
            assert torch.equal(run(part, plan_with(part, NativeBackend.tiling), out_dtype), together[-rows:])


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_outputs_are_the_rounded_fp32_result(out_dtype: torch.dtype) -> None:
    for query_lens in ([1, 1], [12, 1]):
        case = make_case(query_lens, [40, 800], dtype=out_dtype)
        plan = plan_with(case, NativeBackend.tiling)
        assert torch.equal(run(case, plan, out_dtype), run(case, plan).to(out_dtype))


def test_cache_of_another_type_than_the_queries() -> None:
    case = make_case([1, 6], [40, 70], dtype=torch.bfloat16)
    case.qkv = torch.randn(case.qkv.shape)
    check(case)


def test_large_scores_do_not_overflow() -> None:
    case = make_case([1, 5], [200, 300])
    case.scale *= 1e3
    check(case, SMALL, 1e-3)


def test_a_broken_request_stays_alone() -> None:
    case = make_case([1, 1, 30], [600, 40, 50])
    case.qkv[0] = torch.nan
    out = run(case, plan_with(case, NativeBackend.tiling))
    assert out[0].isnan().all() and out[1:].isfinite().all()
