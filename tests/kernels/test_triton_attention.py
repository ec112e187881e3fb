"""The Triton attention op against dense float64 attention, and its planner."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.attention.base import AttentionShape, PlanLimits, create_backend
from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.attention.triton import TritonBackend
from headrace.attention.triton_work_list import SplitRule, build_triton_work_list
from headrace.kernels.triton import attention as attention_op
from headrace.kernels.triton import attention_tiles
from headrace.kernels.triton.attention import attention
from headrace.kernels.triton.attention_tiles import MANY_UNITS, LaunchShape, short_launch
from headrace.kernels.triton.attention_work import ITEM_FIELDS, REDUCE_FIELDS, ROW_FIELDS, TileRows
from tests.kernels.paged_step import PagedStep, make_step
from tests.kernels.triton_setup import DEVICE, HALF, max_error, relative_error

SMALL = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
TINY_SPLITS = {"min_short_tokens": 32, "num_short_cuts": 1, "min_long_tokens": 64}


class FineBackend(TritonBackend):
    """Splits so fine that small contexts have many."""

    def __init__(self, shape: AttentionShape, limits: PlanLimits | None = None) -> None:
        super().__init__(shape, DEVICE, limits)
        self._split = SplitRule(shape.num_kv_heads, **TINY_SPLITS)


def run(step: PagedStep, plan: AttentionPlan, dtype: torch.dtype | None = None) -> torch.Tensor:
    shape = step.shape
    width = shape.num_heads * shape.head_dim
    out = torch.full((len(step.qkv), width), torch.nan, dtype=dtype or step.qkv.dtype, device=DEVICE)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    attention(step.qkv, step.k_cache, step.v_cache, plan, out, *heads, step.scale, step.soft_cap)
    return out


def check(step: PagedStep, plan: AttentionPlan | None = None) -> None:
    plan = plan or FineBackend(step.shape).plan(step.metadata)
    assert relative_error(run(step, plan), step.oracle()) < max_error(step.qkv.dtype)


MIXED = ([1, 1, 40, 7, 0, 1], [1, 70, 40, 90, 5, 33])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_mixed_step(dtype: torch.dtype) -> None:
    check(make_step(*MIXED, SMALL, DEVICE, dtype))


@pytest.mark.parametrize("window", [1, 17, 48])
def test_window(window: int) -> None:
    check(make_step([1, 50, 20], [60, 50, 75], SMALL, DEVICE, torch.float32, window=window))


def test_soft_cap() -> None:
    check(make_step([1, 40], [45, 64], SMALL, DEVICE, torch.float32, soft_cap=2.0))


@pytest.mark.parametrize(
    "shape",
    [AttentionShape(3, 1, 80), AttentionShape(2, 2, 96), AttentionShape(9, 3, 64), AttentionShape(24, 1, 16)],
    ids=str,
)
def test_heads_and_dims_of_any_number(shape: AttentionShape) -> None:
    check(make_step([1, 20], [40, 33], shape, DEVICE, HALF))


@pytest.mark.parametrize("block_size", [32, 64])
def test_block_sizes(block_size: int) -> None:
    check(make_step([1, 33], [100, 70], SMALL, DEVICE, torch.float32, block_size=block_size))


def test_rows_that_stand_before_all_keys_of_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subtiles smaller than a tile, of whose split the first sees nothing."""
    monkeypatch.setattr(attention_op, "long_launch", lambda *_: LaunchShape(16, 32, 2, 4, 4))
    check(make_step([1, 20], [60, 75], SMALL, DEVICE, torch.float32))


GROUP_OF_TWO = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=80)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[LaunchShape]:
    """Those of short tiles, as they come."""
    seen: list[LaunchShape] = []

    def spy(*args: Any, **options: bool) -> LaunchShape:
        seen.append(short_launch(*args, **options))
        return seen[-1]

    monkeypatch.setattr(attention_op, "short_launch", spy)
    return seen


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("is_many", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_either_launch_is_right_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
    launches: list[LaunchShape],
    window: int | None,
    is_many: bool,
    is_fixed: bool,
) -> None:
    """With fewer units than programs, and with more."""
    monkeypatch.setattr(attention_tiles, "MANY_UNITS", 1 if is_many else 1000)
    backend = TritonBackend(GROUP_OF_TWO, DEVICE, PlanLimits(96, 64, 1024) if is_fixed else None)
    for lens in (([1] * 3, [1, 33, 64]), ([1], [300]), ([1, 20], [90, 33]), ([1] * 50, range(20, 70))):
        step = make_step(*lens, GROUP_OF_TWO, DEVICE, HALF, window=window)
        check(step, backend.plan(step.metadata))
    assert {(shape.block_n, shape.num_resident) for shape in launches} == {(32, 8) if is_many else (64, None)}


@pytest.mark.parametrize(
    ("lens", "is_fixed", "is_many"),
    [
        (([1] * 9, [40] * 9), False, False),
        (([1] * 10, [40] * 10), False, True),
        (([1] * 10, [40] * 10), True, True),
        (([1] * 9 + [20], [40] * 10), False, True),
        (([1] * 2, [400] * 2), False, False),
        (([1] * 9 + [20], [40] * 10), True, True),
        (([1] * 2 + [7], [40] * 3), True, False),
    ],
)
def test_the_launch_follows_the_rows(
    monkeypatch: pytest.MonkeyPatch,
    launches: list[LaunchShape],
    lens: tuple[list[int], list[int]],
    is_fixed: bool,
    is_many: bool,
) -> None:
    """Not the parts that contexts are cut into."""
    shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=80)
    monkeypatch.setattr(attention_tiles, "MANY_UNITS", 20)
    step = make_step(*lens, shape, DEVICE, HALF)
    check(
        step, TritonBackend(shape, DEVICE, PlanLimits(64, 16, 128) if is_fixed else None).plan(step.metadata)
    )
    assert [launch.num_resident is not None for launch in launches] == [is_many]


@pytest.mark.parametrize(
    ("group", "block_d", "dtype", "is_quantized", "has_another"),
    [
        (4, 128, torch.bfloat16, False, True),
        (5, 128, torch.float16, False, True),
        (24, 128, torch.bfloat16, False, False),
        (4, 64, torch.bfloat16, False, False),
        (4, 256, torch.bfloat16, False, False),
        (4, 128, torch.float32, False, False),
        (4, 128, torch.bfloat16, True, False),
    ],
)
def test_which_kinds_have_a_launch_for_many_units(
    group: int, block_d: int, dtype: torch.dtype, is_quantized: bool, has_another: bool
) -> None:
    few, many = (
        short_launch(group, block_d, dtype, units, is_quantized=is_quantized)
        for units in (MANY_UNITS - 1, MANY_UNITS)
    )
    assert (few != many) == has_another and many.block_m == few.block_m


def test_registers_are_cut_to_those_that_run_at_a_time() -> None:
    assert LaunchShape(16, 32, 2, 2, 16).options["maxnreg"] == 64
    assert LaunchShape(16, 32, 2, 2, 16, num_resident=8).options["maxnreg"] == 128


def test_shared_prefixes() -> None:
    step = make_step(
        [1, 1, 3, 1], [70, 66, 80, 40], SMALL, DEVICE, torch.float32, prefixes=[([0, 2, 1], 4)], seed=4
    )
    check(step)


def test_shared_prefixes_of_several_levels() -> None:
    levels = [(range(6), 2), ([0, 2, 4], 5, 2), ([1, 5], 4, 2), ([4, 2], 6, 5)]
    lens = [100 + index for index in range(6)]
    step = make_step(
        [1, 1, 1, 1, 3, 1, 2], [*lens, 40], SMALL, DEVICE, torch.float32, prefixes=levels, seed=5
    )
    check(step)
    shared = FineBackend(SMALL).plan(step.metadata)
    ranges = [(int(a), int(b)) for a, b in zip(shared.item_kv_start, shared.item_kv_end, strict=True)]
    assert sum(end <= 32 for _, end in ranges) == 2, "two blocks of all, read once, and the short request"
    limits = PlanLimits(max_tokens=64, max_requests=8, max_context_tokens=128)
    check(step, FineBackend(SMALL, limits).plan(step.metadata))


def test_a_plan_of_another_backend() -> None:
    step = make_step(*MIXED, SMALL, DEVICE, torch.float32)
    check(step, create_backend("reference", step.shape, DEVICE).plan(step.metadata))


def test_fixed_buffers_serve_one_step_after_another() -> None:
    limits = PlanLimits(max_tokens=64, max_requests=8, max_context_tokens=128)
    backend = FineBackend(SMALL, limits)
    for seed in range(3):
        lens = [(MIXED), ([1] * 4, [100, 3, 64, 65]), ([64], [64])][seed]
        step = make_step(*lens, SMALL, DEVICE, torch.float32, seed=seed)
        check(step, backend.plan(step.metadata))


def test_a_row_does_not_depend_on_the_others() -> None:
    alone = make_step([5], [90], SMALL, DEVICE, torch.float32, seed=1)
    together = make_step([5, 1, 60], [90, 33, 60], SMALL, DEVICE, torch.float32, seed=2)
    together.qkv[:5] = alone.qkv
    key = torch.arange(90, device=DEVICE)
    blocks = [step.metadata.block_table[0, key // 16].long() for step in (alone, together)]
    for name in ("k_cache", "v_cache"):
        source, target = getattr(alone, name), getattr(together, name)
        target[blocks[1], :, key % 16] = source[blocks[0], :, key % 16]
    outs = [run(step, FineBackend(SMALL).plan(step.metadata)) for step in (alone, together)]
    assert torch.equal(outs[0], outs[1][:5])


@pytest.mark.parametrize(
    ("contexts", "cut"),
    [
        ([1024], 128),
        ([1024] * 8, 256),
        ([1024] * 16, 256),
        ([1024] * 32, 512),
        ([1024] * 64, 1024),
        ([20_000] * 8, 1024),
    ],
)
def test_decodes_are_cut_so_that_they_fill_a_gpu(contexts: list[int], cut: int) -> None:
    assert SplitRule(8).short_cut(np.array(contexts)) == cut


@pytest.mark.parametrize("contexts", [[600] * 448, [1024] * 256, list(range(100, 2000, 7))])
def test_many_decodes_are_not_cut(contexts: list[int]) -> None:
    assert SplitRule(8).short_cut(np.array(contexts)) >= max(contexts)


def test_one_long_context_among_many_is_cut() -> None:
    assert SplitRule(8).short_cut(np.array([500] * 255 + [60_000])) <= 8192


def test_empty_step() -> None:
    step = make_step([0], [5], SMALL, DEVICE, torch.float32)
    assert run(step, TritonBackend(SMALL, DEVICE).plan(step.metadata)).shape == (0, 64)


def test_work_lists_cover_every_visible_key_once() -> None:
    rng = np.random.default_rng(0)
    rows, split = TileRows.for_group(2), SplitRule(2, **TINY_SPLITS)
    for _ in range(60):
        context_lens = rng.integers(1, 700, rng.integers(1, 6))
        query_lens = [int(rng.choice([1, context, rng.integers(1, context + 1)])) for context in context_lens]
        window = rng.choice([None, 1, 20, 300])
        step = make_step(query_lens, context_lens.tolist(), SMALL, torch.device("cpu"), torch.float16)
        data = step.metadata
        object.__setattr__(data, "window", None if window is None else int(window))
        work = build_triton_work_list(data, rows, split)
        items = list(zip(*(work.arrays[f"item_{name}"] for name in NAMES), strict=True))
        seen: dict[int, list[tuple[int, int]]] = {}
        for place, (request, start, end, first, count, _) in enumerate(items):
            assert start < end and (count <= rows.short) == (place < work.num_short)
            for row in range(first, first + count):
                token, position = (int(work.arrays[name][row]) for name in ("query_rows", "row_positions"))
                assert data.query_starts[request] <= token < data.query_starts[request + 1]
                seen.setdefault(token, []).append(
                    (max(start, low_of(position, window)), min(end, position + 1))
                )
        assert len(seen) == sum(query_lens)
        for token, ranges in seen.items():
            position = int(work.arrays["row_positions"][token])
            covered = sorted(span for span in ranges if span[0] < span[1])
            assert covered[0][0] == low_of(position, window) and covered[-1][1] == position + 1
            assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))


def test_decodes_alone_are_planned_as_in_any_step() -> None:
    """A request without tokens changes nothing but the way that is taken."""
    rng = np.random.default_rng(1)
    numbers = [1, 2, 7, 64, 300]
    for _ in range(300):
        count = int(rng.choice(numbers))
        contexts = rng.integers(1, int(rng.choice([3, 100, 1000, 50_000])), count).astype(np.int32)
        window = rng.choice([None, 1, 20, 300, 5000])
        split = SplitRule(int(rng.choice([1, 8])), **(TINY_SPLITS if rng.random() < 0.5 else {}))
        rows = TileRows.for_group(int(rng.choice([1, 4, 16])))
        works = []
        for more in (0, 1):
            metadata = AttentionMetadata(
                query_starts=np.append(np.arange(count + 1), [count] * more).astype(np.int32),
                context_lens=np.append(contexts, [9] * more).astype(np.int32),
                block_table=torch.zeros(0),
                block_size=16,
                window=None if window is None else int(window),
            )
            works.append(build_triton_work_list(metadata, rows, split))
        assert works[0].num_short == works[1].num_short
        assert works[0].arrays.keys() == works[1].arrays.keys()
        for name, values in works[1].arrays.items():
            assert np.array_equal(works[0].arrays[name], values), name


def test_plans_in_one_buffer_have_the_tensors_of_their_own_lengths() -> None:
    """Views are made again when lengths change, also back to earlier ones."""
    backend = TritonBackend(SMALL, DEVICE, PlanLimits(64, 8, 512))
    for contexts in ([40, 30], [41, 31], [300], [42, 32], [43, 33]):
        step = make_step([1] * len(contexts), contexts, SMALL, DEVICE, torch.float32)
        fixed, exact = backend.plan(step.metadata), TritonBackend(SMALL, DEVICE).plan(step.metadata)
        for name in (*ROW_FIELDS, *ITEM_FIELDS, *REDUCE_FIELDS):
            assert torch.equal(getattr(fixed, name), getattr(exact, name)), name


NAMES = ("request", "kv_start", "kv_end", "row_start", "num_rows", "partial_start")


def low_of(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


LLAMA = AttentionShape(32, 8, 128)
LARGE = {
    "decode": ([1] * 24, list(range(1000, 1024)), LLAMA, {}),
    "short contexts": ([1] * 200, list(range(50, 450, 2)), LLAMA, {}),
    "short contexts beside a chunk": ([1] * 200 + [90], [*range(50, 450, 2), 90], LLAMA, {}),
    "long context": ([1, 3], [20_000, 9_000], LLAMA, {}),
    "prefill": ([1500], [1500], LLAMA, {}),
    "prefill after context": ([300, 40], [4000, 3000], LLAMA, {}),
    "mixed": ([1] * 20 + [500, 77], [700] * 20 + [900, 77], LLAMA, {}),
    "blocks of 32": ([700, 1, 90], [1500, 300, 90], LLAMA, {"block_size": 32}),
    "blocks of 64": ([513, 65, 33], [2000, 70, 5000], LLAMA, {"block_size": 64}),
    "blocks of 128": ([200, 140], [200, 1111], LLAMA, {"block_size": 128}),
    "mqa 256 window": ([1, 200, 1], [900, 700, 30], AttentionShape(4, 1, 256), {"window": 512}),
    "head dim 64": ([1, 300], [500, 400], AttentionShape(9, 3, 64), {}),
    "head dim 80": ([1, 300], [500, 400], AttentionShape(32, 32, 80), {}),
    "head dim 96": ([1, 300], [500, 400], AttentionShape(32, 8, 96), {"soft_cap": 30.0}),
    "group of 7": ([1, 300], [500, 400], AttentionShape(28, 4, 128), {}),
    "group of 2": ([1, 300], [500, 400], AttentionShape(16, 8, 128), {}),
    "group of 1": ([300, 129], [500, 129], AttentionShape(8, 8, 128), {}),
    "group of 32": ([100, 5], [500, 400], AttentionShape(32, 1, 128), {}),
    "group of 16": ([2, 300], [500, 400], AttentionShape(32, 2, 128), {"window": 130}),
    "shared prefix": ([1] * 40, [600] * 40, LLAMA, {"prefixes": [(range(40), 30)]}),
    "long shared prefix": ([1] * 150, [9000] * 150, LLAMA, {"prefixes": [(range(150), 512)]}),
    "shared prefix of chunks": (
        [1] * 30 + [70, 130],
        [1500] * 30 + [1570, 1630],
        LLAMA,
        {"prefixes": [(range(32), 90)], "block_size": 16},
    ),
    "levels": (
        [1] * 64,
        [1500] * 64,
        LLAMA,
        {"prefixes": [(range(64), 30), (range(32), 60, 30), (range(32, 64), 80, 30), (range(9), 90, 60)]},
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", LARGE)
def test_large_steps(name: str, dtype: torch.dtype) -> None:
    query_lens, context_lens, shape, options = LARGE[name]
    step = make_step(query_lens, context_lens, shape, DEVICE, dtype, **options)
    plan = TritonBackend(shape, DEVICE).plan(step.metadata)
    assert relative_error(run(step, plan), step.oracle()) < max_error(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.05, 0.125, 0.2, 1.0])
def test_rows_that_see_nothing_of_a_round(scale: float) -> None:
    """Whatever the scale, which decides how a hidden score and the top of such a row are rounded."""
    step = replace(make_step([300], [400], LLAMA, DEVICE, torch.bfloat16), scale=scale)
    plan = TritonBackend(LLAMA, DEVICE).plan(step.metadata)
    assert relative_error(run(step, plan), step.oracle()) < max_error(torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [[1] * 64, [1] * 7 + [57]], ids=["decodes", "a chunk"])
def test_a_graph_replays_other_steps(query_lens: list[int]) -> None:
    limits = PlanLimits(max_tokens=64, max_requests=64, max_context_tokens=4096)
    backend = TritonBackend(LLAMA, DEVICE, limits)
    steps = [
        make_step(query_lens, [length] * len(query_lens), LLAMA, DEVICE, torch.bfloat16, seed=length)
        for length in (100, 2000, 700)
    ]
    qkv = torch.empty_like(steps[0].qkv)
    out = torch.empty(64, 4096, dtype=torch.bfloat16, device=DEVICE)
    for step in steps:
        plan = backend.plan(step.metadata)
        qkv.copy_(step.qkv)
        arguments = (step.k_cache, step.v_cache, plan, out, 32, 8, 128, step.scale, None)
        attention(qkv, *arguments)  # compiles
        expected = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attention(qkv, *arguments)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
        assert relative_error(out, step.oracle()) < max_error(torch.bfloat16)
