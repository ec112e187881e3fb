"""The kernel of short tiles over keys and values of 8 bits, with codes straight in the matrix units' layout.

Codes come by asynchronous copies into a ring in shared memory and leave it once, as words that lie where the matrix
units want their numbers: the order of a head's numbers is free if queries have the same, and so is the order of the
outputs' columns. Numbers are fp16, which every format fits exactly and fp8 reaches by one instruction for two codes.
Queries are brought into fp16's range by a power of two a row, weights by the largest scale of the values so far.

Every warp has keys of its own and an online softmax of its own; they are merged at the end of a unit.

Legend: as in ``attention_kernels`` and ``attention_ring_codes``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from headrace.kernels.triton import attention_common as common
from headrace.kernels.triton.attention_ring_codes import (
    KEY_E4M3,
    KEY_E5M2,
    KEY_INT8,
    SHARED,
    SIXTEEN,
    VALUE_E4M3,
    VALUE_E5M2,
    VALUE_INT8,
    WORDS,
    ask,
    bases,
    key_operand,
    key_words,
    load_ids,
    load_scales,
    numbers,
    scale_words,
    scores_layout,
    value_operand,
    value_words,
)
from headrace.kernels.triton.launch import let_next_start, wait_for_previous

_HIDDEN, _LOG2_E, _FAR = (gl.constexpr(x.value) for x in (common.HIDDEN, common.LOG2_E, common.FAR))
_NUM_SHORT, _ROWS_AT, _ITEMS_AT, _ITEM_SIZE = (
    gl.constexpr(x.value) for x in (common.NUM_SHORT, common.ROWS_AT, common.ITEMS_AT, common.ITEM_SIZE)
)
_REQUEST, _KV_START, _KV_END, _ROW_START, _ROW_COUNT, _PARTIAL_START = (
    gl.constexpr(x.value)
    for x in (
        common.REQUEST,
        common.KV_START,
        common.KV_END,
        common.ROW_START,
        common.ROW_COUNT,
        common.PARTIAL_START,
    )
)


@gluon.constexpr_function
def _query_words(warps):
    """[W, 16, D]: 64 bytes of two rows a thread, the same in each warp."""
    reg = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 8, 0]]
    lane = [[0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(reg, lane, bases(warps, 3), [], [warps, 16, 128])


@gluon.jit
def _load_rows(item, rows_ptr, row):
    """[M] each: whether there is a row, its token; positions [1, M, 1], and the lowest of them."""
    is_row = row < gl.load(item + _ROW_COUNT)
    at = rows_ptr + (gl.load(item + _ROW_START) + row) * 2
    token = gl.load(at, mask=is_row, other=0)
    position = gl.load(at + 1, mask=is_row, other=0)
    return is_row, token, position[None, :][:, :, None], gl.min(gl.where(is_row, position, _FAR), axis=0)


@gluon.jit
def _load_queries(qkv_ptr, qkv_stride, token, head, is_row, scale, C: gl.constexpr, WARPS: gl.constexpr):
    """(four quarters [W, M, words] of the queries in the order of the keys' numbers, [W, M] their factor)."""
    LAYOUT: gl.constexpr = _query_words(WARPS)
    M: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    dim = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    place = token.to(gl.int64) * qkv_stride + head * C.head_dim
    place = gl.convert_layout(place, M)[None, :] + (warp * 0)[:, None]
    mask = gl.convert_layout(is_row, M)[None, :] & (warp >= 0)[:, None]
    pointers = qkv_ptr + place[:, :, None] + dim[None, :][:, None, :]
    mask = gl.broadcast(mask[:, :, None], pointers)[0]
    q = gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    exponent = gl.max(gl.abs(q), axis=2).to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(gl.maximum(exponent - 135, -64), 64)  # the largest becomes 256 to 512
    factor = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
    inverse = ((127 + exponent) << 23).to(gl.float32, bitcast=True)
    q = (q * factor[:, :, None]).to(gl.float16)
    q = q.reshape([WARPS, 16, 4, 2, 2, 2, 2, 2]).permute([0, 1, 3, 4, 2, 7, 5, 6])
    first, second = gl.split(q.reshape([WARPS, 16, WORDS, 2, 2]))  # halves of pairs: the other bit stays
    q0, q2 = gl.split(first)
    q1, q3 = gl.split(second)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, scores_layout(WARPS), 2)
    q0 = gl.convert_layout(q0, LEFT, assert_trivial=True)
    q1 = gl.convert_layout(q1, LEFT, assert_trivial=True)
    q2 = gl.convert_layout(q2, LEFT, assert_trivial=True)
    q3 = gl.convert_layout(q3, LEFT, assert_trivial=True)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(2, scores_layout(WARPS)))
    return q0, q1, q2, q3, inverse * (scale * _LOG2_E)


@gluon.jit
def _product(q0, q1, q2, q3, k, FORMAT: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr):
    """[W, M, S] products of queries and codes of keys."""
    PTX: gl.constexpr = KEY_INT8 if FORMAT == "int8" else (KEY_E4M3 if FORMAT == "fp8e4nv" else KEY_E5M2)
    k0, k1, k2, k3 = numbers(k, PTX)
    product = gl.full([WARPS, 16, C.block_n // WARPS], 0.0, gl.float32, scores_layout(WARPS))
    product = mma_v2(q0, key_operand(k0, C, WARPS), product)
    product = mma_v2(q1, key_operand(k1, C, WARPS), product)
    product = mma_v2(q2, key_operand(k2, C, WARPS), product)
    return mma_v2(q3, key_operand(k3, C, WARPS), product)


@gluon.jit
def _add_values(
    acc0, acc1, acc2, acc3, weight, shrink, v, FORMAT: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    PTX: gl.constexpr = (
        VALUE_INT8 if FORMAT == "int8" else (VALUE_E4M3 if FORMAT == "fp8e4nv" else VALUE_E5M2)
    )
    weight = gl.convert_layout(weight, gl.DotOperandLayout(0, scores_layout(WARPS), 2), assert_trivial=True)
    v0, v1, v2, v3 = numbers(v, PTX)
    acc0 = mma_v2(weight, value_operand(v0, C, WARPS), acc0 * shrink)
    acc1 = mma_v2(weight, value_operand(v1, C, WARPS), acc1 * shrink)
    acc2 = mma_v2(weight, value_operand(v2, C, WARPS), acc2 * shrink)
    acc3 = mma_v2(weight, value_operand(v3, C, WARPS), acc3 * shrink)
    return acc0, acc1, acc2, acc3


@gluon.jit
def _mask(
    score, v_scale, first, start, end, positions, lowest, window, C: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Scores of keys that rows do not see hidden, scales of values outside of [start, end) zero: only where there may
    be any."""
    if C.has_window or first + C.block_n > gl.minimum(end, lowest + 1):
        KEYS: gl.constexpr = gl.SliceLayout(1, scores_layout(WARPS))
        warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, KEYS))
        lane = gl.arange(0, C.block_n // WARPS, layout=gl.SliceLayout(0, KEYS))
        place = warp[:, None] * (C.block_n // WARPS) + lane[None, :]
        inside = place < end - first
        is_seen = place[:, None, :] < gl.minimum(positions + 1, end) - first
        if C.has_window:
            inside = inside & (place >= start - first)
            is_seen = is_seen & (place[:, None, :] >= gl.maximum(positions + 1 - window, start) - first)
        score = gl.where(is_seen, score, _HIDDEN)
        v_scale = gl.where(inside, v_scale, 0.0)
    return score, v_scale


@gluon.jit
def _fill(
    k_ring, v_ring, k_start, v_start, table, begin, start, end, word_stride,
    IDS: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Ask for as many rounds as the ring has slots."""
    STAGES: gl.constexpr = C.num_stages
    for stage in gl.static_range(STAGES):
        first = begin + stage * C.block_n
        blocks = load_ids(table, first, end, C, IDS)
        ask(k_ring.index(stage), k_start, blocks, first, start, end, word_stride, C, WARPS)
        ask(v_ring.index(stage), v_start, blocks, first, start, end, word_stride, C, WARPS)


@gluon.jit
def _weigh(score, v_scale, factor, top, total, largest, WARPS: gl.constexpr):
    """One step of the online softmax: (weights of the codes of values, by what sums until now shrink, and the new
    highest score, total and largest scale)."""
    new_top = gl.maximum(top, gl.max(score, axis=2) * factor)
    weight = gl.exp2(score * factor[:, :, None] - new_top[:, :, None])
    shrink = gl.exp2(top - new_top)
    total = total * shrink + gl.sum(weight, axis=2)
    new_largest = gl.maximum(largest, gl.max(v_scale, axis=1))
    fraction = v_scale * (1.0 / new_largest)[:, None]
    PER_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, scores_layout(WARPS)))
    change = gl.convert_layout(largest / new_largest, PER_WARP)
    weight = (weight * fraction[:, None, :]).to(gl.float16)
    return weight, shrink * change[:, None], new_top, total, new_largest


@gluon.jit
def _store_quarter(
    acc, factor, total, out_ptr, out_stride, partials_ptr, token, row, head, is_row, partial_start,
    QUARTER: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Of each word of a head the dim ``QUARTER``, of all warps' accs."""
    result = gl.sum(acc * factor[:, :, None], axis=0) / total[:, None]
    label = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, scores_layout(WARPS))))
    dim = 16 * (label % 8) + 4 * (label // 8) + QUARTER
    if partial_start < 0:
        place = token.to(gl.int64)[:, None] * out_stride + head[:, None] * C.head_dim + dim[None, :]
        gl.store(
            out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=gl.broadcast(is_row[:, None], place)[0]
        )
    else:
        place = ((partial_start + row).to(gl.int64) * C.num_heads + head)[:, None] * C.head_dim + dim[None, :]
        gl.store(partials_ptr + place, result, mask=gl.broadcast(is_row[:, None], place)[0])


@gluon.jit
def _store(
    acc0, acc1, acc2, acc3, top, total, largest, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row,
    head, is_row, partial, C: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """All warps' results as one, to the output or to partial slots with their log2-sum-exp."""
    SCORES: gl.constexpr = scores_layout(WARPS)
    O: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SCORES))
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SCORES))
    top_0 = gl.convert_layout(gl.convert_layout(gl.max(top, axis=0), O), ROWS)
    factor = gl.exp2(top - top_0[None, :])
    total = gl.sum(total * factor, axis=0)
    total = gl.where(total > 0.0, total, 1.0)
    largest = gl.convert_layout(largest, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))
    factor = factor * largest[:, None]
    if partial >= 0:
        place = (partial + row).to(gl.int64) * C.num_heads + head
        gl.store(log_sums_ptr + place, top_0 + gl.log2(gl.convert_layout(total, ROWS)), mask=is_row)
    total = gl.convert_layout(total, O)
    token, row = gl.convert_layout(token, O), gl.convert_layout(row, O)
    head, is_row = gl.convert_layout(head, O), gl.convert_layout(is_row, O)
    _store_quarter(
        acc0, factor, total, out_ptr, out_stride, partials_ptr, token, row, head, is_row, partial, 0, C, WARPS
    )  # fmt: skip
    _store_quarter(
        acc1, factor, total, out_ptr, out_stride, partials_ptr, token, row, head, is_row, partial, 1, C, WARPS
    )  # fmt: skip
    _store_quarter(
        acc2, factor, total, out_ptr, out_stride, partials_ptr, token, row, head, is_row, partial, 2, C, WARPS
    )  # fmt: skip
    _store_quarter(
        acc3, factor, total, out_ptr, out_stride, partials_ptr, token, row, head, is_row, partial, 3, C, WARPS
    )  # fmt: skip


@gluon.jit(do_not_specialize=["table_stride", "window"])
def coded_ring_kernel(
    qkv_ptr, k_ptr, v_ptr, out_ptr, partials_ptr, log_sums_ptr, table_ptr, plan_ptr,
    qkv_stride, out_stride, table_stride, word_stride, scale, soft_cap, window,
    k_scales_ptr, v_scales_ptr, scales_stride, FORMAT: gl.constexpr, WARPS: gl.constexpr, C: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The short items of a cache of 8 bits, of which k_ptr and v_ptr are int32 words; FORMAT: of a code."""
    let_next_start(PDL)
    SIXTEENS: gl.constexpr = C.block_n // SIXTEEN
    SCORES: gl.constexpr = scores_layout(WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SCORES))
    IDS: gl.constexpr = gl.SliceLayout(1, scale_words(WARPS, SIXTEENS))
    AHEAD: gl.constexpr = C.num_stages * C.block_n
    k_ring = gl.allocate_shared_memory(gl.int32, [C.num_stages, SIXTEENS, 16, WORDS], SHARED)
    v_ring = gl.allocate_shared_memory(gl.int32, [C.num_stages, SIXTEENS, 16, WORDS], SHARED)
    m = gl.arange(0, C.block_m, layout=ROWS)
    row = m // C.group
    wait_for_previous(PDL)
    rows_ptr = plan_ptr + gl.load(plan_ptr + _ROWS_AT)
    items_ptr = plan_ptr + gl.load(plan_ptr + _ITEMS_AT)
    num_units = gl.load(plan_ptr + _NUM_SHORT) * C.num_kv_heads
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    for turn in range(gl.cdiv(num_units, num_programs)):
        unit = turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)
        if unit < num_units:
            item = items_ptr + (unit // C.num_kv_heads) * _ITEM_SIZE
            kv_head = unit % C.num_kv_heads
            table = table_ptr + gl.load(item + _REQUEST).to(gl.int64) * table_stride
            start = gl.load(item + _KV_START)
            end = gl.load(item + _KV_END)
            begin = start
            if C.has_window:
                begin = start // SIXTEEN * SIXTEEN
            k_start = k_ptr + kv_head * (C.k_stride // 4)
            v_start = v_ptr + kv_head * (C.v_stride // 4)
            k_scales = k_scales_ptr + kv_head * C.k_plane_scales
            v_scales = v_scales_ptr + kv_head * C.v_plane_scales
            near = load_ids(table, begin, end, C, IDS)
            k_scale = load_scales(k_scales, near, begin, end, scales_stride, C, WARPS)
            v_scale = load_scales(v_scales, near, begin, end, scales_stride, C, WARPS)
            _fill(k_ring, v_ring, k_start, v_start, table, begin, start, end, word_stride, IDS, C, WARPS)
            near = load_ids(table, begin + C.block_n, end, C, IDS)
            far = load_ids(table, begin + AHEAD, end, C, IDS)
            head = kv_head * C.group + m % C.group
            is_row, token, positions, lowest = _load_rows(item, rows_ptr, row)
            q0, q1, q2, q3, factor = _load_queries(qkv_ptr, qkv_stride, token, head, is_row, scale, C, WARPS)
            top = gl.full([WARPS, C.block_m], _HIDDEN, gl.float32, gl.SliceLayout(2, SCORES))
            total = gl.full([WARPS, C.block_m], 0.0, gl.float32, gl.SliceLayout(2, SCORES))
            largest = gl.full([WARPS], 1e-30, gl.float32, gl.SliceLayout(1, gl.SliceLayout(1, SCORES)))
            acc0 = gl.full([WARPS, C.block_m, WORDS], 0.0, gl.float32, SCORES)
            acc1, acc2, acc3 = acc0, acc0, acc0
            slot = 0
            for first in range(begin, end, C.block_n):
                next_k_scale = load_scales(k_scales, near, first + C.block_n, end, scales_stride, C, WARPS)
                next_v_scale = load_scales(v_scales, near, first + C.block_n, end, scales_stride, C, WARPS)
                near = load_ids(table, first + 2 * C.block_n, end, C, IDS)
                async_copy.wait_group(2 * C.num_stages - 1)
                k = k_ring.index(slot).load(key_words(WARPS, SIXTEENS))
                ask(k_ring.index(slot), k_start, far, first + AHEAD, start, end, word_stride, C, WARPS)
                score = _product(q0, q1, q2, q3, k, FORMAT, C, WARPS) * k_scale[:, None, :]
                score, v_scale = _mask(score, v_scale, first, start, end, positions, lowest, window, C, WARPS)
                weight, shrink, top, total, largest = _weigh(
                    score, v_scale, factor, top, total, largest, WARPS
                )
                async_copy.wait_group(2 * C.num_stages - 1)
                v = v_ring.index(slot).load(value_words(WARPS, SIXTEENS))
                ask(v_ring.index(slot), v_start, far, first + AHEAD, start, end, word_stride, C, WARPS)
                far = load_ids(table, first + C.block_n + AHEAD, end, C, IDS)
                acc0, acc1, acc2, acc3 = _add_values(
                    acc0, acc1, acc2, acc3, weight, shrink[:, :, None], v, FORMAT, C, WARPS
                )  # fmt: skip
                k_scale, v_scale = next_k_scale, next_v_scale
                slot = gl.where(slot == C.num_stages - 1, 0, slot + 1)
            async_copy.wait_group(0)
            _store(
                acc0, acc1, acc2, acc3, top, total, largest, out_ptr, out_stride, partials_ptr, log_sums_ptr, token,
                row, head, is_row, gl.load(item + _PARTIAL_START), C, WARPS,
            )  # fmt: skip
