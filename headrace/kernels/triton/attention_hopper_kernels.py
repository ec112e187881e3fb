"""The long-tiles kernel of ``attention`` for Hopper, written in Gluon: warps with roles.

Four warps fetch K and V, block by block, into a ring in shared memory; two groups of four warps take half of a tile's
rows each, multiply, and run the online softmax. The groups meet only at the ring, so one's softmax overlaps with the
other's matrix products, as in FlashAttention 3 (Shah et al.).

A ring is (slots, full, empty): shared memory of ``NUM_STAGES`` rounds, and two barriers for each.

Legend: see ``attention_kernels``; this kernel takes tiles of 128 rows, rounds of 128 keys, head dims 64 and 128.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.triton import attention_work as work

_NUM_ITEMS = gl.constexpr(work.NUM_ITEMS)
_NUM_SHORT = gl.constexpr(work.NUM_SHORT)
_ROWS_AT = gl.constexpr(work.ROWS_AT)
_ITEMS_AT = gl.constexpr(work.ITEMS_AT)
_ITEM_SIZE = gl.constexpr(work.ITEM_SIZE)
_REQUEST = gl.constexpr(work.ITEM_FIELDS.index("item_request"))
_KV_START = gl.constexpr(work.ITEM_FIELDS.index("item_kv_start"))
_KV_END = gl.constexpr(work.ITEM_FIELDS.index("item_kv_end"))
_ROW_START = gl.constexpr(work.ITEM_FIELDS.index("item_row_start"))
_ROW_COUNT = gl.constexpr(work.ITEM_FIELDS.index("item_num_rows"))
_PARTIAL_START = gl.constexpr(work.ITEM_FIELDS.index("item_partial_start"))

HALF_ROWS = gl.constexpr(64)
BLOCK_N = gl.constexpr(128)
NUM_STAGES = gl.constexpr(2)
PIECE = gl.constexpr(32)
NUM_FETCHERS = gl.constexpr(128)
HIDDEN = gl.constexpr(-1.0e30)
LOG2_E = gl.constexpr(1.4426950408889634)
_FAR = gl.constexpr(1 << 30)


@gluon.jit
def _fetch_tile(tile, source, table, first, end, block_stride, C: gl.constexpr):
    """Keys (or values) [first, first + BLOCK_N) into one slot of the ring; zeros from ``end`` on.

    In pieces, so that few registers hold their addresses.
    """
    LANES: gl.constexpr = C.head_dim // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    lane = gl.arange(0, PIECE, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.expand_dims(gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, LAYOUT)), 0)
    for piece in gl.static_range(BLOCK_N // PIECE):
        key = first + piece * PIECE + lane
        blocks = gl.load(table + key // C.block_size, mask=key < end, other=0)
        place = blocks.to(gl.int64) * block_stride + (key % C.block_size) * C.head_dim
        async_copy.async_copy_global_to_shared(
            tile.slice(piece * PIECE, PIECE),
            source + gl.expand_dims(place, 1) + dim,
            mask=gl.expand_dims(key < end, 1),
        )


@gluon.jit
def _fetch(plan_ptr, table_ptr, k_ptr, v_ptr, table_stride, block_stride, keys, values, C: gl.constexpr):
    """Fill both rings with the keys and values of this program's units, in order."""
    k_ring, k_full, k_empty = keys
    v_ring, v_full, v_empty = values
    items_ptr = plan_ptr + gl.load(plan_ptr + _ITEMS_AT)
    first_item = gl.load(plan_ptr + _NUM_SHORT)
    num_units = (gl.load(plan_ptr + _NUM_ITEMS) - first_item) * C.num_kv_heads
    count = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item = items_ptr + (first_item + unit // C.num_kv_heads) * _ITEM_SIZE
        offset = unit % C.num_kv_heads * C.head_stride
        table = table_ptr + gl.load(item + _REQUEST).to(gl.int64) * table_stride
        end = gl.load(item + _KV_END)
        for first in range(gl.load(item + _KV_START), end, BLOCK_N):
            stage = count % NUM_STAGES
            phase = (count // NUM_STAGES + 1) & 1
            mbarrier.wait(k_empty.index(stage), phase)
            _fetch_tile(k_ring.index(stage), k_ptr + offset, table, first, end, block_stride, C)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase)
            _fetch_tile(v_ring.index(stage), v_ptr + offset, table, first, end, block_stride, C)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            count += 1
    async_copy.wait_group(0)


@gluon.jit
def _load_half(
    qkv_ptr, qkv_stride, rows_ptr, row_start, num_rows, kv_head, q_buffer, HALF: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """One group's 64 query rows into shared memory."""
    LANES: gl.constexpr = C.head_dim // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    m = HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    is_row = m // C.group < num_rows
    token = gl.load(rows_ptr + (row_start + m // C.group) * 2, mask=is_row, other=0)
    place = token.to(gl.int64) * qkv_stride + (kv_head * C.group + m % C.group) * C.head_dim
    offsets = gl.expand_dims(place, 1) + gl.expand_dims(dim, 0)
    q_buffer.store(gl.load(qkv_ptr + offsets, mask=gl.expand_dims(is_row, 1), other=0.0))
    fence_async_shared()


@gluon.jit
def _soften(score, top, total, first, position, end, scaling, C: gl.constexpr, IS_CUT: gl.constexpr):
    """A step of the online softmax: (weights of the keys from ``first`` on, top, total, what older sums shrink by).

    IS_CUT: some rows may not see all of the keys.
    """
    S: gl.constexpr = score.type.layout
    scale, soft_cap, window = scaling
    if C.has_soft_cap:
        exponent = score * (scale * 2.0 * LOG2_E / soft_cap)
        score = soft_cap * LOG2_E * (1.0 - 2.0 / (1.0 + gl.exp2(exponent)))
    if IS_CUT:
        key = gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S)), 0)
        row_position = gl.expand_dims(position, 1)
        is_seen = (key <= row_position) & (key < end)
        if C.has_window:
            is_seen = is_seen & (key > row_position - window)
        score = gl.where(is_seen, score, HIDDEN)
    factor = 1.0
    if not C.has_soft_cap:
        factor = scale * LOG2_E
    new_top = gl.maximum(top, gl.max(score, axis=1) * factor)
    safe_top = new_top
    if IS_CUT:  # a row that has seen no key yet: its weights are 0, not exp2(HIDDEN - HIDDEN)
        safe_top = gl.where(new_top < HIDDEN * 0.01, 0.0, new_top)
    weight = gl.exp2(score * factor - gl.expand_dims(safe_top, 1))
    shrink = gl.exp2(top - safe_top)
    return weight, new_top, total * shrink + gl.sum(weight, axis=1), shrink


@gluon.jit
def _multiply_keys(q_buffer, keys, count):
    """Start the products of the queries with the keys of round ``count``, once they are there."""
    ring, full, _ = keys
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    blank = gl.full([HALF_ROWS, BLOCK_N], 0.0, gl.float32, layout=S)
    stage = count % NUM_STAGES
    mbarrier.wait(full.index(stage), (count // NUM_STAGES) & 1)
    return warpgroup_mma(q_buffer, ring.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)


@gluon.jit
def _multiply_values(p, acc, values, count):
    """Start adding the products of weights and the values of round ``count``, once they are there."""
    ring, full, _ = values
    stage = count % NUM_STAGES
    mbarrier.wait(full.index(stage), (count // NUM_STAGES) & 1)
    return warpgroup_mma(p, ring.index(stage), acc, is_async=True)


@gluon.jit
def _release(ring, count):
    """The group has read its slot of round ``count``."""
    _, _, empty = ring
    gl.thread_barrier()
    mbarrier.arrive(empty.index(count % NUM_STAGES))


@gluon.jit
def _attend_rounds(
    q_buffer, anchor, state, start, stop, position, end, scaling, keys, values, C: gl.constexpr, IS_CUT: gl.constexpr
):  # fmt: skip
    """Rounds of keys [start, stop). The last round's weights ``p`` meet their values while this one's are made."""
    p, acc, top, total, count = state
    O: gl.constexpr = acc.type.layout
    for first in range(start, stop, BLOCK_N):
        score = _multiply_keys(q_buffer, keys, count + 1)
        sums = _multiply_values(p, acc, values, count)
        score = warpgroup_mma_wait(1, deps=(score,))
        _release(keys, count + 1)
        weight, top, total, shrink = _soften(score, top, total, first, position, end, scaling, C, IS_CUT)
        # A store that the barrier waits for: else the compiler would wait for the sums before it makes the weights.
        anchor.store(total)
        gl.thread_barrier()
        acc, p = warpgroup_mma_wait(0, deps=(sums, p))
        _release(values, count)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, O)), 1)
        p = gl.convert_layout(weight.to(q_buffer.dtype), p.type.layout)
        count += 1
    return (p, acc, top, total, count)


@gluon.jit
def _attend_half(
    plan_ptr, qkv_ptr, qkv_stride, outputs, scaling, q_buffer, anchor, keys, values, HALF: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Half of the rows of this program's units, in order: products, online softmax, stores."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.head_dim, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    m = HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, S))
    rows_ptr = plan_ptr + gl.load(plan_ptr + _ROWS_AT)
    items_ptr = plan_ptr + gl.load(plan_ptr + _ITEMS_AT)
    first_item = gl.load(plan_ptr + _NUM_SHORT)
    num_units = (gl.load(plan_ptr + _NUM_ITEMS) - first_item) * C.num_kv_heads
    count = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item = items_ptr + (first_item + unit // C.num_kv_heads) * _ITEM_SIZE
        kv_head = unit % C.num_kv_heads
        start = gl.load(item + _KV_START)
        end = gl.load(item + _KV_END)
        row_start = gl.load(item + _ROW_START)
        num_rows = gl.load(item + _ROW_COUNT)
        _load_half(qkv_ptr, qkv_stride, rows_ptr, row_start, num_rows, kv_head, q_buffer, HALF, C)
        is_row = m // C.group < num_rows
        position = gl.load(rows_ptr + (row_start + m // C.group) * 2 + 1, mask=is_row, other=0)
        top = gl.full([HALF_ROWS], HIDDEN, gl.float32, layout=gl.SliceLayout(1, S))
        total = gl.full([HALF_ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, S))
        acc = gl.full([HALF_ROWS, C.head_dim], 0.0, gl.float32, layout=O)

        score = warpgroup_mma_wait(0, deps=(_multiply_keys(q_buffer, keys, count),))
        _release(keys, count)
        weight, top, total, _ = _soften(score, top, total, start, position, end, scaling, C, True)
        p = gl.convert_layout(weight.to(q_buffer.dtype), P)
        state = (p, acc, top, total, count)
        second = start + BLOCK_N
        full_end = second
        if not C.has_window:
            lowest = gl.min(gl.where(is_row, position, _FAR), axis=0)
            full_end = second + gl.maximum(gl.minimum(end, lowest + 1) - second, 0) // BLOCK_N * BLOCK_N
            state = _attend_rounds(
                q_buffer, anchor, state, second, full_end, position, end, scaling, keys, values, C, False
            )  # fmt: skip
        state = _attend_rounds(
            q_buffer, anchor, state, full_end, end, position, end, scaling, keys, values, C, True
        )  # fmt: skip
        p, acc, top, total, count = state
        acc, p = warpgroup_mma_wait(0, deps=(_multiply_values(p, acc, values, count), p))
        _release(values, count)
        count += 1
        partial_start = gl.load(item + _PARTIAL_START)
        _store_half(acc, top, total, outputs, rows_ptr, row_start, num_rows, kv_head, partial_start, HALF, C)


@gluon.jit
def _store_half(
    acc, top, total, outputs, rows_ptr, row_start, num_rows, kv_head, partial_start,
    HALF: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One group's rows to the output, or to partial slots with their log2-sum-exp."""
    out_ptr, out_stride, partials_ptr, log_sums_ptr = outputs
    O: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, O)
    m = HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=ROW)
    dim = gl.expand_dims(gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, O)), 0)
    row = m // C.group
    head = kv_head * C.group + m % C.group
    is_row = row < num_rows
    top = gl.convert_layout(top, ROW)
    total = gl.convert_layout(total, ROW)
    is_empty = total == 0.0
    result = acc / gl.expand_dims(gl.where(is_empty, 1.0, total), 1)
    mask = gl.expand_dims(is_row, 1)
    if partial_start < 0:
        token = gl.load(rows_ptr + (row_start + row) * 2, mask=is_row, other=0)
        place = token.to(gl.int64) * out_stride + head * C.head_dim
        gl.store(out_ptr + gl.expand_dims(place, 1) + dim, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        slot = (partial_start + row).to(gl.int64) * C.num_heads + head
        gl.store(partials_ptr + gl.expand_dims(slot * C.head_dim, 1) + dim, result, mask=mask)
        log_sum = gl.where(is_empty, HIDDEN, top + gl.log2(gl.where(is_empty, 1.0, total)))
        gl.store(log_sums_ptr + slot, log_sum, mask=is_row)


@gluon.jit(do_not_specialize=["table_stride", "window"])
def hopper_long_tiles_kernel(
    qkv_ptr, k_ptr, v_ptr, out_ptr, partials_ptr, log_sums_ptr, table_ptr, plan_ptr,
    qkv_stride, out_stride, table_stride, block_stride, scale, soft_cap, window,
    C: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The long items; each (item, KV head) is one unit of a persistent grid.

    A slot of a ring is full when all fetching threads' copies have arrived, and empty when both groups have read it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    DTYPE: gl.constexpr = k_ptr.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_buffers = gl.allocate_shared_memory(DTYPE, [2, HALF_ROWS, C.head_dim], TILE)
    k_ring = gl.allocate_shared_memory(DTYPE, [NUM_STAGES, BLOCK_N, C.head_dim], TILE)
    v_ring = gl.allocate_shared_memory(DTYPE, [NUM_STAGES, BLOCK_N, C.head_dim], TILE)
    anchors = gl.allocate_shared_memory(gl.float32, [2, HALF_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full.index(stage), count=NUM_FETCHERS)
        mbarrier.init(v_full.index(stage), count=NUM_FETCHERS)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    gl.thread_barrier()
    keys, values = (k_ring, k_full, k_empty), (v_ring, v_full, v_empty)
    outputs = (out_ptr, out_stride, partials_ptr, log_sums_ptr)
    scaling = (scale, soft_cap, window)
    first, second = q_buffers.index(0), q_buffers.index(1)
    gl.warp_specialize(
        [
            (
                _attend_half,
                (
                    plan_ptr,
                    qkv_ptr,
                    qkv_stride,
                    outputs,
                    scaling,
                    first,
                    anchors.index(0),
                    keys,
                    values,
                    0,
                    C,
                ),
            ),
            (
                _attend_half,
                (
                    plan_ptr,
                    qkv_ptr,
                    qkv_stride,
                    outputs,
                    scaling,
                    second,
                    anchors.index(1),
                    keys,
                    values,
                    1,
                    C,
                ),
            ),
            (_fetch, (plan_ptr, table_ptr, k_ptr, v_ptr, table_stride, block_stride, keys, values, C)),
        ],
        [4, 4],
        [216, 72],
    )
