"""Kernels that find the k-th largest number of a row, or the edge of its top-p nucleus, without sorting.

Floats in the order of their values are integers, so the edge is searched for as an integer: each pass over the row
counts and sums what lies above eight candidates, which narrows the range to an eighth. As soon as few numbers are
left in the range they are gathered, and the rest of the search happens in registers. One program does a whole row, in
a fixed order, so a row's edge does not depend on the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.launch import let_next_start, wait_for_previous
from headrace.kernels.triton.sampling_kernels import load_logits, weights_of

NUM_PIVOTS = tl.constexpr(8)
_SIGN = tl.constexpr(0x7FFFFFFF)
_ABOVE_ONE = tl.constexpr(0x3F800001)
_LOWEST = tl.constexpr(-0x80000000)


@triton.jit
def keys_of(x):
    """int32 in the order of fp32 numbers; those of numbers >= 0 are their bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _SIGN)


@triton.jit
def _load_values(row_ptr, col, num_tokens, row_max, temperature, IS_WEIGHT: tl.constexpr):
    logits = load_logits(row_ptr, col, num_tokens)
    if IS_WEIGHT:
        return weights_of(logits, row_max, temperature)
    else:
        return logits


@triton.jit
def _count_above(
    row_ptr, num_tokens, row_max, temperature, pivots, IS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """([8] int32, [8] float64): how many numbers of the row have a key >= each pivot, and their sum."""
    counts = tl.zeros([NUM_PIVOTS, BLOCK], tl.int32)
    sums = tl.zeros([NUM_PIVOTS, BLOCK], tl.float32)
    for start in range(0, num_tokens, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = _load_values(row_ptr, col, num_tokens, row_max, temperature, IS_WEIGHT)[None, :]
        is_above = (keys_of(values) >= pivots[:, None]) & (col < num_tokens)[None, :]
        counts += is_above.to(tl.int32)
        if IS_WEIGHT:
            sums += tl.where(is_above, values, 0.0)
    return tl.sum(counts, axis=1), tl.sum(sums.to(tl.float64), axis=1)


@triton.jit
def _gather_between(
    row_ptr,
    num_tokens,
    row_max,
    temperature,
    low,
    high,
    scratch_ptr,
    IS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the row's numbers with keys in [low, high) into scratch, in their order; how many there are."""
    found = 0
    for start in range(0, num_tokens, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = _load_values(row_ptr, col, num_tokens, row_max, temperature, IS_WEIGHT)
        keys = keys_of(values).to(tl.int64)
        is_inside = ((keys >= low) & (keys < high) & (col < num_tokens)).to(tl.int32)
        count = tl.sum(is_inside, axis=0)
        if count > 0:
            place = found + tl.cumsum(is_inside, axis=0) - 1
            tl.store(scratch_ptr + place, values, mask=is_inside > 0)
            found += count
    return found


@triton.jit
def _is_enough(count, total, wanted, BY_MASS: tl.constexpr):
    """Whether what lies above a candidate reaches what is wanted: a number of tokens, or a mass."""
    if BY_MASS:
        return total >= wanted
    else:
        return count.to(tl.float64) >= wanted


@triton.jit
def search(
    row_ptr, num_tokens, row_max, temperature, wanted, low, high, scratch_ptr,
    BY_MASS: tl.constexpr, IS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high), int64, such that the numbers from it on are enough.

    Args:
        wanted: float64; so many numbers, or, BY_MASS, this share of the sum of those from ``low`` on.
        low, high: int64 keys; from ``low`` on there is enough, from ``high`` on nothing.
        scratch_ptr: room for CAPACITY numbers.
    """
    pivot = tl.arange(0, NUM_PIVOTS)
    count_high = 0
    sum_high = tl.full([], 0.0, tl.float64)
    num_left = num_tokens + CAPACITY  # the first pass is never left out: it finds the sum
    is_first = True
    while (high - low > 1) & (num_left > CAPACITY):
        step = (high - low + NUM_PIVOTS - 1) // NUM_PIVOTS
        pivots = tl.minimum(low + step * pivot, high).to(tl.int32)
        counts, sums = _count_above(row_ptr, num_tokens, row_max, temperature, pivots, IS_WEIGHT, BLOCK)
        if BY_MASS:  # noqa: SIM102 - known when compiling, the other is not
            if is_first:
                wanted = wanted * tl.max(sums, axis=0)
        is_first = False
        enough = _is_enough(counts, sums, wanted, BY_MASS) | (pivot == 0)
        last = tl.sum(enough.to(tl.int32), axis=0) - 1
        if last + 1 < NUM_PIVOTS:
            count_high = tl.sum(tl.where(pivot == last + 1, counts, 0), axis=0)
            sum_high = tl.sum(tl.where(pivot == last + 1, sums, 0.0), axis=0)
            high = tl.minimum(high, low + step * (last + 1))
        low = low + step * last
        num_left = tl.sum(tl.where(pivot == last, counts, 0), axis=0) - count_high
    if high - low > 1:
        found = _gather_between(
            row_ptr, num_tokens, row_max, temperature, low, high, scratch_ptr, IS_WEIGHT, BLOCK
        )
        tl.debug_barrier()
        index = tl.arange(0, CAPACITY)
        values = tl.load(scratch_ptr + index, mask=index < found, other=0.0)
        keys = keys_of(values).to(tl.int64)
        while high - low > 1:
            middle = low + (high - low) // 2
            is_above = (keys >= middle) & (index < found)
            count = count_high + tl.sum(is_above.to(tl.int32), axis=0)
            total = sum_high + tl.sum(tl.where(is_above, values, 0.0).to(tl.float64), axis=0)
            enough = _is_enough(count, total, wanted, BY_MASS)
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        tl.debug_barrier()
    return low


@triton.jit(
    do_not_specialize_on_alignment=["row_max_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"]
)
def threshold_kernel(
    logits_ptr, row_max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, scratch_ptr,
    row_stride, num_tokens,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The smallest weight that each row's filters keep: min_p, then top_k, then top_p of what is left."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    scratch = scratch_ptr + row * CAPACITY
    wait_for_previous(PDL)
    row_max = tl.load(row_max_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    above = tl.full([], _ABOVE_ONE, tl.int64)
    low = tl.full([], 0, tl.int64)
    if HAS_MIN_P:
        low = tl.load(min_p_ptr + row).to(tl.int32, bitcast=True).to(tl.int64)
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < num_tokens):
            none = tl.full([], 0, tl.int64)
            last = search(
                logits, num_tokens, row_max, temperature, top_k.to(tl.float64), none, above, scratch,
                False, True, BLOCK, CAPACITY,
            )  # fmt: skip
            low = tl.maximum(low, last)
    if HAS_TOP_P:
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            low = search(
                logits, num_tokens, row_max, temperature, top_p.to(tl.float64), low, above, scratch,
                True, True, BLOCK, CAPACITY,
            )  # fmt: skip
    tl.store(threshold_ptr + row, low.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["wanted"])
def top_tokens_kernel(
    logits_ptr, values_ptr, ids_ptr, scratch_ptr, row_stride, num_tokens, wanted,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The ``wanted`` <= WIDTH largest logits of each row, falling, and their indices; the lower first among equals.

    Those above the edge and as many of the first ones on it as there is room for are collected, then put in order by
    counting, for each, those that come before it.
    """
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    wait_for_previous(PDL)
    low = tl.full([], _LOWEST, tl.int64)
    high = tl.full([], _SIGN, tl.int64)
    edge = search(
        logits, num_tokens, 0.0, 1.0, wanted.to(tl.float64), low, high, scratch_ptr + row * CAPACITY,
        False, False, BLOCK, CAPACITY,
    )  # fmt: skip
    slots = ids_ptr + row * wanted
    pivots = tl.full([NUM_PIVOTS], 0, tl.int64) + edge + 1
    counts, _ = _count_above(logits, num_tokens, 0.0, 1.0, pivots.to(tl.int32), False, BLOCK)
    above = 0
    equal = tl.max(counts, axis=0)  # those on the edge come after those above it
    for start in range(0, num_tokens, BLOCK):
        col = start + tl.arange(0, BLOCK)
        keys = keys_of(load_logits(logits, col, num_tokens)).to(tl.int64)
        is_above = ((keys > edge) & (col < num_tokens)).to(tl.int32)
        is_equal = ((keys == edge) & (col < num_tokens)).to(tl.int32)
        if tl.max(is_above + is_equal, axis=0) > 0:
            place = above + tl.cumsum(is_above, axis=0) - 1
            tl.store(slots + place, col.to(tl.int64), mask=is_above > 0)
            above += tl.sum(is_above, axis=0)
            place = equal + tl.cumsum(is_equal, axis=0) - 1
            tl.store(slots + place, col.to(tl.int64), mask=(is_equal > 0) & (place < wanted))
            equal += tl.sum(is_equal, axis=0)
    tl.debug_barrier()
    slot = tl.arange(0, WIDTH)
    ids = tl.load(slots + slot, mask=slot < wanted, other=0)
    values = tl.load(logits + ids, mask=slot < wanted, other=0.0)
    is_before = (values[:, None] > values[None, :]) | (
        (values[:, None] == values[None, :]) & (ids[:, None] < ids[None, :])
    )
    rank = tl.sum((is_before & (slot < wanted)[:, None]).to(tl.int32), axis=0)
    tl.debug_barrier()
    tl.store(slots + rank, ids, mask=slot < wanted)
    tl.store(values_ptr + row * wanted + rank, values, mask=slot < wanted)
