"""Long prompt chunks through a library: the rule, the plan, and results against dense float64 attention."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.attention.base import AttentionShape
from headrace.attention.library import LibraryBackend, LibraryRule
from headrace.attention.metadata import AttentionPlan
from headrace.attention.triton import TritonBackend
from headrace.kernels.triton.attention import attention
from headrace.kernels.triton.library_attention import LIBRARY_KEY, AttentionLibrary, cudnn_attend
from headrace.kernels.triton.library_thread import Lengths
from tests.attention.plain_library import PlainTorch
from tests.kernels.paged_step import PagedStep, make_step
from tests.kernels.triton_setup import DEVICE, max_error, relative_error

SMALL = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
RULE = LibraryRule(min_rows=16, min_pairs=0, unit=8, max_piece=32, max_padding=2.5)
MAX_TOKENS = 64


def make_backend(
    attend: PlainTorch,
    shape: AttentionShape = SMALL,
    dtype: torch.dtype = torch.float32,
    rule: LibraryRule = RULE,
    block_size: int = 16,
    usual: Sequence[Lengths] = (),
) -> LibraryBackend:
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size)
    rows = rule.max_rows(MAX_TOKENS)
    options = {"max_rows": rows, "max_piece": rule.max_piece}
    library = AttentionLibrary(*heads, dtype, DEVICE, **options, attend=attend, usual=usual)
    return LibraryBackend(shape, library, rule)


def plan_ready(backend: LibraryBackend, step: PagedStep) -> AttentionPlan:
    """The plan of a step whose lengths the library has met."""
    first = backend.plan(step.metadata)
    assert LIBRARY_KEY not in first.derived, "what was never met is not ready"
    prepare_all(backend)
    return backend.plan(step.metadata)


def prepare_all(backend: LibraryBackend) -> None:
    thread = backend._library.thread
    while thread.prepare():
        thread.wait()


def run(step: PagedStep, plan: AttentionPlan) -> torch.Tensor:
    shape = step.shape
    out = torch.full((len(step.qkv), shape.num_heads * shape.head_dim), torch.nan, dtype=step.qkv.dtype)
    out = out.to(DEVICE)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    attention(step.qkv, step.k_cache, step.v_cache, plan, out, *heads, step.scale, step.soft_cap)
    return out


def stored(step: PagedStep) -> PagedStep:
    """The step with the chunks' keys and values in qkv too, as ``rope_and_store`` leaves them."""
    shape, data = step.shape, step.metadata
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    for request, context in enumerate(data.context_lens.tolist()):
        start, stop = data.query_starts[request : request + 2].tolist()
        key = torch.arange(context - (stop - start), context, device=DEVICE)
        block = data.block_table[request, key // data.block_size].long()
        for first, cache in ((heads, step.k_cache), (heads + kv_heads, step.v_cache)):
            rows = cache[block, :, key % data.block_size].flatten(1)
            step.qkv[start:stop, first * dim : (first + kv_heads) * dim] = rows
    return step


def check(
    query_lens: Sequence[int], context_lens: Sequence[int], num_spans: int, **options: Any
) -> PlainTorch:
    shape, dtype = options.pop("shape", SMALL), options.pop("dtype", torch.float32)
    step = stored(make_step(query_lens, context_lens, shape, DEVICE, dtype, **options))
    attend = PlainTorch()
    backend = make_backend(attend, shape, dtype, block_size=options.get("block_size", 16))
    plan = plan_ready(backend, step)
    assert len(plan.derived[LIBRARY_KEY].spans) == num_spans
    assert plan.num_tokens == sum(query_lens)
    attend.calls.clear()
    assert relative_error(run(step, plan), step.oracle()) < max_error(dtype)
    return attend


def test_a_chunk_without_context_is_a_square_in_place() -> None:
    attend = check([32], [32], 1)
    assert attend.calls == [(32, 32, True)]


def test_a_chunk_is_padded() -> None:
    assert check([29], [29], 1).calls == [(32, 32, True)]


@pytest.mark.parametrize("cached", [8, 13, 32, 32 + 16 + 8 + 5, 4 * 32 + 7, 6 * 32 + 31])
def test_context_in_pieces_and_what_is_left_of_it_in_front(cached: int) -> None:
    attend = check([24], [24 + cached], 1)
    assert sum(keys for _, keys, is_causal in attend.calls if not is_causal) == cached // 8 * 8
    assert {rows for rows, _, is_causal in attend.calls if not is_causal} <= {24}


def test_one_step_with_all_kinds_of_requests() -> None:
    attend = check([1, 20, 7, 0, 24, 3], [50, 20, 90, 5, 24 + 45, 3], 2, seed=3)
    assert len(attend.threads) == 1 and threading.get_ident() not in attend.threads


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_sizes(block_size: int) -> None:
    check([24, 1], [24 + 77, 40], 1, block_size=block_size)


@pytest.mark.parametrize("shape", [AttentionShape(9, 3, 24), AttentionShape(20, 4, 40)], ids=str)
def test_heads_and_dims_of_any_number(shape: AttentionShape) -> None:
    check([20], [20 + 45], 1, shape=shape)


def test_half_precision() -> None:
    check([20], [20 + 4 * 32 + 45], 1, dtype=torch.float16)


def test_what_is_behind_a_chunk_or_was_there_before_does_not_touch_it() -> None:
    """Rows of another request, NaN, stand behind the chunk; the shared memory holds NaN from the call before."""
    step = stored(make_step([20, 20], [20 + 13, 20], SMALL, DEVICE, torch.float32))
    step.qkv[20:] = torch.nan
    attend = PlainTorch()
    backend = make_backend(attend)
    plan = plan_ready(backend, step)
    backend._library._staged.fill_(torch.nan)
    backend._library._piece.fill_(torch.nan)
    for _ in range(2):
        out = run(step, plan)
        assert relative_error(out[:20], step.oracle()[:20]) < max_error(torch.float32)


def test_rows_that_are_wider_than_the_library_s() -> None:
    step = stored(make_step([32], [32 + 8], SMALL, DEVICE, torch.float32))
    wide = torch.full((32, step.qkv.shape[1] + 8), torch.nan, device=DEVICE)
    wide[:, : step.qkv.shape[1]] = step.qkv
    plan = plan_ready(make_backend(PlainTorch()), step)
    expected = step.oracle()
    step.qkv = wide[:, : step.qkv.shape[1]]
    assert relative_error(run(step, plan), expected) < max_error(torch.float32)


def test_who_stays_with_the_paged_kernels() -> None:
    """Short chunks, windows, requests that share a prefix, and those that would be padded too much."""
    for query_lens, context_lens, options in (
        ([15], [80], {}),
        ([24], [80], {"window": 40}),
        ([17, 20], [64 + 17, 64 + 20], {"prefixes": [([0, 1], 4)]}),
    ):
        step = make_step(query_lens, context_lens, SMALL, DEVICE, torch.float32, **options)
        backend = make_backend(PlainTorch())
        assert not backend._spans(step.metadata) and not backend._library.thread._wanted
        assert relative_error(run(step, backend.plan(step.metadata)), step.oracle()) < 1e-5


def test_the_rule_in_tokens() -> None:
    rule = LibraryRule()
    assert rule.span(0, 0, 2047, 0) is None
    assert rule.span(0, 0, 2048, 0) is None and rule.span(0, 0, 4096, 0) is None, "the host is slower"
    assert rule.span(0, 0, 2048, 14336) is not None
    assert rule.span(0, 0, 7200, 0) is None, "8,192 rows are too many for 7,200"
    first = rule.span(0, 0, 8192, 0)
    assert first is not None and first.is_in_place and not first.pieces
    later = rule.span(3, 100, 8192, 21808)
    assert later is not None
    assert later.pieces == (16384, 4096, 1024) and later.num_front == 304
    assert (later.num_square, later.num_padded) == (9216, 8192)
    rng = np.random.default_rng(0)
    for num_rows, cached in rng.integers((2048, 0), (8193, 100_000), (300, 2)).tolist():
        span = rule.span(0, 0, num_rows, cached)
        if span is not None:
            assert (
                sum(span.pieces) + span.num_front == cached and span.num_square >= span.num_front + num_rows
            )
            rows = max(span.num_square, span.num_front + span.num_padded)
            assert span.num_padded >= num_rows and rows <= rule.max_rows(8192)
            assert max((pair.num_keys for pair in span.lengths()[1:]), default=0) <= rule.max_piece


def test_the_usual_lengths() -> None:
    """In the order of use: chunks that follow one another, then those that begin anywhere."""

    def usual(max_chunk: int, max_context: int) -> list[tuple[int, int, bool]]:
        return [tuple(lengths) for lengths in LibraryRule().usual(max_chunk, max_context)]

    rows = 8192
    whole, front = (rows, rows, True), (rows + 1024, rows + 1024, True)
    pieces = {size: (rows, size, False) for size in (1024, 2048, 4096, 8192, 16384)}
    assert usual(rows, 131072) == [
        *(whole, pieces[8192], pieces[16384], front),
        *(pieces[size] for size in (4096, 2048, 1024)),
    ]
    assert usual(rows, rows) == [whole], "a prompt is one chunk"
    assert usual(rows, rows + 2500) == [whole, front, pieces[2048], pieces[1024]], "no context is longer"
    assert usual(8000, 16500)[:5] == [whole, front, pieces[4096], pieces[2048], pieces[1024]]
    rng = np.random.default_rng(0)
    for max_chunk, max_context in rng.integers((2048, 8192), (8193, 100_000), (50, 2)).tolist():
        known = set(LibraryRule().usual(max_chunk, max_context))
        for cached in (
            rng.integers(0, max_context - max_chunk + 1, 20).tolist() if max_context > max_chunk else []
        ):
            span = LibraryRule().span(0, 0, max_chunk, cached)
            assert span is None or known >= set(span.lengths())


def test_one_miss_of_a_usual_length_asks_for_all_of_them() -> None:
    """And what was missed itself comes first; lengths of other chunks ask for nothing else."""
    usual = RULE.usual(32, 128)
    attend = PlainTorch()
    backend = make_backend(attend, usual=usual)
    backend.plan(make_step([24], [24], SMALL, DEVICE, torch.float32).metadata)
    prepare_all(backend)
    assert attend.calls == [(24, 24, True)]
    attend.calls.clear()
    backend.plan(make_step([32], [32 + 16], SMALL, DEVICE, torch.float32).metadata)
    prepare_all(backend)
    assert attend.calls[:2] == [(32, 32, True), (32, 16, False)]
    assert len(attend.calls) == len(usual) and set(attend.calls) == set(map(tuple, usual))
    for cached in (0, 32, 64, 96, 45):
        step = make_step([32], [32 + cached], SMALL, DEVICE, torch.float32)
        assert LIBRARY_KEY in backend.plan(step.metadata).derived


def test_plans_are_made_one_at_a_time_and_the_library_serves_between() -> None:
    first, second = (make_step([32], [32 + cached], SMALL, DEVICE, torch.float32) for cached in (0, 32))
    attend = PlainTorch()
    backend = make_backend(attend, usual=RULE.usual(32, 64))
    thread = backend._library.thread
    backend.plan(first.metadata)
    assert thread.prepare()
    thread.wait()
    assert thread.is_idle and len(attend.calls) == 1
    assert LIBRARY_KEY in backend.plan(first.metadata).derived
    assert LIBRARY_KEY not in backend.plan(second.metadata).derived
    assert thread.prepare()
    thread.wait()
    assert LIBRARY_KEY in backend.plan(second.metadata).derived


def test_while_plans_are_made_the_paged_kernels_serve_all() -> None:
    known = make_step([32], [32], SMALL, DEVICE, torch.float32)
    other = make_step([40], [40], SMALL, DEVICE, torch.float32)
    attend = PlainTorch()
    backend = make_backend(attend)
    thread = backend._library.thread
    assert LIBRARY_KEY in plan_ready(backend, known).derived
    let_go = threading.Event()
    make_ready, thread._make_ready = (
        thread._make_ready,
        lambda lengths: (let_go.wait(10), make_ready(lengths)),
    )
    backend.plan(other.metadata)
    assert thread.is_idle, "nothing begins before it is told to"
    thread.prepare()
    assert not thread.is_idle
    assert LIBRARY_KEY not in backend.plan(known.metadata).derived
    let_go.set()
    thread.wait()
    for step in (known, other):
        assert LIBRARY_KEY in backend.plan(step.metadata).derived


def test_a_library_that_fails_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    step = make_step([32], [32], SMALL, DEVICE, torch.float32)
    attend = PlainTorch()
    attend.error = RuntimeError("no such engine")
    backend = make_backend(attend)
    assert LIBRARY_KEY not in plan_ready(backend, step).derived
    assert "own kernels serve all" in caplog.text
    attend.error = None
    assert not backend._library.thread.prepare()
    assert LIBRARY_KEY not in backend.plan(step.metadata).derived


def test_an_error_of_a_call_reaches_the_step() -> None:
    step = make_step([32], [32], SMALL, DEVICE, torch.float32)
    attend = PlainTorch()
    plan = plan_ready(make_backend(attend), step)
    attend.error = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        run(step, plan)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens", [(4096, 0), (3000, 0), (2048, 5000), (2900, 3 * 16384 + 8192 + 2048 + 77)], ids=str
)
def test_cudnn(lens: tuple[int, int]) -> None:
    shape, rule = AttentionShape(32, 8, 128), LibraryRule(min_pairs=0, max_padding=2.0)
    step = stored(make_step([1, lens[0]], [300, sum(lens)], shape, DEVICE, torch.bfloat16, num_layers=1))
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, 16)
    rows = rule.max_rows(4096)
    library = AttentionLibrary(
        *heads, torch.bfloat16, DEVICE, max_rows=rows, max_piece=rule.max_piece, attend=cudnn_attend
    )
    plan = plan_ready(LibraryBackend(shape, library, rule), step)
    assert len(plan.derived[LIBRARY_KEY].spans) == 1
    expected = run(step, TritonBackend(shape, DEVICE).plan(step.metadata))
    assert relative_error(run(step, plan), expected) < 2 * max_error(torch.bfloat16)
