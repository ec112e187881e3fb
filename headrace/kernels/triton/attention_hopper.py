"""Long tiles on Hopper, by warps with roles: FlashAttention 3 (Shah et al. 2024) over paged blocks.

One warp asks for blocks of keys, one for blocks of values, by tensor copies into rings in shared memory; two bring the
queries of the next unit. Two groups of four warps multiply, each 64 rows of a tile: the products of a round's keys and
those of the weights with the values of the round before are under way together, and the softmax of the round begins
when the first are done, beside the second and beside the products of the other group. Both are waited for within a
round: the assembler serializes what is under way at its end.

Rounds go from an item's last keys to its first, so that those with a mask, and the values that must be cleared because
nobody wrote them, come first.

Legend: as in ``attention_kernels``; M 128 rows of a tile, of which a group has G 64; N 128 keys of a round, R rounds.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.triton.attention_hopper_copies import (
    SHARED,
    N,
    copy_blocks,
    copy_queries,
    num_rounds_of,
    num_turns_of,
    unit_of,
)
from headrace.kernels.triton.gluon_names import barrier
from headrace.kernels.triton.launch import let_next_start, wait_for_previous
from headrace.kernels.triton.ring_slots import next_slot


@gluon.constexpr_function
def _product_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _clear_end(v_ring, slot, num_keys, C: gl.constexpr):
    """Zeros in place of a round's values from ``num_keys`` on: weights of zero would let NaN through.

    Both groups do it, each before its own products: they write the same.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SPANS: gl.constexpr = C.head_dim // N.value.span
    PARTS: gl.constexpr = C.block_n // 16
    tiles = v_ring._reinterpret(v_ring.dtype, [C.num_stages * SPANS * PARTS, 16, N.value.span], SHARED)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    for part in range(gl.maximum(num_keys, 0) // 16, PARTS):
        is_key = (row + part * 16 < num_keys)[:, None]
        for span in gl.static_range(SPANS):
            tile = tiles.index((slot * SPANS + span) * PARTS + part)
            values = tile.load(LAYOUT)
            tile.store(gl.where(gl.broadcast(is_key, values)[0], values, 0.0))
    hopper.fence_async_shared()
    barrier()


@gluon.jit
def _exp2(x):
    """Without the four instructions that keep the smallest numbers."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _sum(weight):
    """[G, 4] sums of a row's weights in each of the four threads that have them: what is left to add, is at the end."""
    parts = weight.reshape([weight.shape[0], weight.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, axis=3), axis=1)


@gluon.jit
def _weigh(score, top, factor, limit, IS_MASKED: gl.constexpr):
    """One step of the online softmax: (weights [G, N], top [G]).

    Hidden scores are infinite, so that their weights are zero: a finite one times the factor, less its own rounded
    product as the top of a row that sees none, is any number.

    limit: [G] the last key that each row sees, counted from the round's first.
    """
    LAYOUT: gl.constexpr = score.type.layout
    if IS_MASKED:
        key = gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        score = gl.where(key[None, :] <= limit[:, None], score, N.value.hidden)
    top = gl.maximum(top, gl.max(score, axis=1) * factor)
    return _exp2(score * factor - top[:, None]), top


@gluon.jit
def _pack(weight, dtype: gl.constexpr):
    """[G, N / 2] words of two neighbours each: numbers of 16 bits that go round a loop are shuffled about."""
    PTX: gl.constexpr = "cvt.rn.bf16x2.f32" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32"
    first, second = gl.split(weight.reshape([weight.shape[0], weight.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        PTX + " $0, $2, $1;", "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _as_operand(words, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """[G, N] weights where the matrix units want them."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    weight = gl.join(first, second).reshape([words.shape[0], words.shape[1] * 2]).to(dtype, bitcast=True)
    return gl.convert_layout(weight, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def _attend(
    q, weight, top, total, acc, rings, barriers, k_slot, k_phase, v_slot, v_phase, factor, limit,
    num_rounds, IS_MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Rounds of keys, each together with the values of the round before, whose weights are ``weight`` [G, N]."""
    k_ring, v_ring = rings
    k_full, k_empty, v_full, v_empty = barriers
    KEYS: gl.constexpr = _product_layout(C.block_n)
    DIMS: gl.constexpr = _product_layout(C.head_dim)
    for _ in range(num_rounds):
        score = gl.full([N.value.half, C.block_n], 0.0, gl.float32, KEYS)
        limit += C.block_n
        mbarrier.wait(k_full.index(k_slot), k_phase)
        score = hopper.warpgroup_mma(
            q, k_ring.index(k_slot).permute((1, 0)), score, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(v_slot), v_phase)
        operand = _as_operand(weight, k_ring.dtype, DIMS)
        acc = hopper.warpgroup_mma(operand, v_ring.index(v_slot), acc, is_async=True)
        score = hopper.warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(k_empty.index(k_slot), count=1)
        next_weight, new_top = _weigh(score, top, factor, limit, IS_MASKED)
        shrink = _exp2(top - new_top)
        top = new_top
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + _sum(
            next_weight
        )
        # a wait that is over: the assembler moves no weight across its branch, so that none is computed behind the next
        mbarrier.wait(v_full.index(v_slot), v_phase)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        weight = _pack(next_weight, k_ring.dtype)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, DIMS))[:, None]
        k_slot, k_phase = next_slot(k_slot, k_phase, C.num_stages)
        v_slot, v_phase = next_slot(v_slot, v_phase, C.num_stages)
    return weight, top, total, acc, k_slot, k_phase, v_slot, v_phase, limit


@gluon.jit
def _positions(rows, row_m, last, C: gl.constexpr):
    """Positions of rows; far behind all keys where there is no row."""
    row = row_m // C.group
    return gl.load(rows + row * 2 + 1, mask=row <= last, other=N.value.far)


@gluon.jit
def _load_tile(source, turn, num_turns, m, C: gl.constexpr):
    """What a group needs of a turn's unit: (KV head, rows, last row, first partial slot, start and end of the keys,
    positions of its rows); nothing is read of a turn that there is not."""
    items_ptr, rows_ptr = source
    item, kv_head = unit_of(items_ptr, turn, C)
    is_unit = turn < num_turns
    rows = rows_ptr + gl.load(item + N.value.row_start, mask=is_unit, other=0) * 2
    last = gl.load(item + N.value.row_count, mask=is_unit, other=0) - 1
    partial_start = gl.load(item + N.value.partial_start, mask=is_unit, other=0)
    start = gl.load(item + N.value.kv_start, mask=is_unit, other=0)
    end = gl.load(item + N.value.kv_end, mask=is_unit, other=0)
    return kv_head, rows, last, partial_start, start, end, _positions(rows, m, last, C)


@gluon.jit
def _multiply(group, WHICH: gl.constexpr, C: gl.constexpr):
    """The role of a group: one half of each tile."""
    source, to, rings, barriers, query_barriers, q_ring, num_turns, scale = group
    k_ring, v_ring = rings
    k_full, k_empty, v_full, v_empty = barriers
    q_full, q_empty = query_barriers
    HALF: gl.constexpr = N.value.half
    KEYS: gl.constexpr = _product_layout(C.block_n)
    DIMS: gl.constexpr = _product_layout(C.head_dim)
    factor = scale * N.value.log2_e
    m = WHICH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, KEYS))
    k_slot, k_phase, v_slot, v_phase = 0, 0, 0, 0
    kv_head, rows, last, partial_start, start, end, positions = _load_tile(source, 0, num_turns, m, C)
    for turn in range(num_turns):
        # the lowest position is found here, of what was carried in this layout: Triton's loop-aware CSE loses others
        rounds = num_rounds_of(start, end, C)
        whole_rounds = gl.maximum(gl.minimum(end, gl.min(positions, axis=0) + 1) - start, 0) // C.block_n
        whole_rounds = gl.minimum(whole_rounds, rounds - 1)
        last_first = start + (rounds - 1) * C.block_n
        limit = gl.minimum(positions, end - 1) - last_first
        q_slot = turn & 1
        q = q_ring.index(q_slot).slice(WHICH * HALF, HALF, dim=0)
        mbarrier.wait(q_full.index(q_slot), turn >> 1 & 1)
        hopper.fence_async_shared()
        mbarrier.wait(k_full.index(k_slot), k_phase)
        score = gl.full([HALF, C.block_n], 0.0, gl.float32, KEYS)
        score = hopper.warpgroup_mma(
            q, k_ring.index(k_slot).permute((1, 0)), score, use_acc=False, is_async=True
        )
        score = hopper.warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(k_empty.index(k_slot), count=1)
        k_slot, k_phase = next_slot(k_slot, k_phase, C.num_stages)
        top = gl.full([HALF], N.value.lowest_top, gl.float32, gl.SliceLayout(1, KEYS))
        weight, top = _weigh(score, top, factor, limit, True)
        total = _sum(weight)
        weight = _pack(weight, k_ring.dtype)
        if (end - last_first) % C.block_size != 0:
            mbarrier.wait(v_full.index(v_slot), v_phase)
            _clear_end(v_ring, v_slot, end - last_first, C)
        acc = gl.full([HALF, C.head_dim], 0.0, gl.float32, DIMS)
        weight, top, total, acc, k_slot, k_phase, v_slot, v_phase, limit = _attend(
            q, weight, top, total, acc, rings, barriers, k_slot, k_phase, v_slot, v_phase, factor, limit,
            rounds - 1 - whole_rounds, True, C,
        )  # fmt: skip
        weight, top, total, acc, k_slot, k_phase, v_slot, v_phase, limit = _attend(
            q, weight, top, total, acc, rings, barriers, k_slot, k_phase, v_slot, v_phase, factor, limit,
            whole_rounds, False, C,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(q_slot), count=1)
        mbarrier.wait(v_full.index(v_slot), v_phase)
        acc = hopper.warpgroup_mma(
            _as_operand(weight, k_ring.dtype, DIMS), v_ring.index(v_slot), acc, is_async=True
        )
        next_head, next_rows, next_last, next_partial, start, end, positions = _load_tile(
            source, turn + 1, num_turns, m, C
        )
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        v_slot, v_phase = next_slot(v_slot, v_phase, C.num_stages)
        total = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, KEYS))
        _store(acc, top, total, to, rows, last, partial_start, kv_head, WHICH, C)
        kv_head, rows, last, partial_start = next_head, next_rows, next_last, next_partial


@gluon.constexpr_function
def _store_layout(C):
    """Whole rows, 16 bytes a thread."""
    across = C.head_dim // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _store(acc, top, total, to, rows, last, partial_start, kv_head, WHICH: gl.constexpr, C: gl.constexpr):
    """A group's rows to the output, or to partial slots with their log2-sum-exp."""
    out_ptr, out_stride, partials_ptr, log_sums_ptr = to
    total = gl.where(total > 0.0, total, 1.0)  # rows that see none of an item's keys: zeros of weight zero
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc.type.layout))
    acc = acc * inverse[:, None]
    if partial_start < 0:
        _store_rows(acc, out_ptr, out_stride, rows, last, kv_head, WHICH, C)
    else:
        log_sum = top + gl.log2(total)
        _store_partials(acc, log_sum, partials_ptr, log_sums_ptr, partial_start, last, kv_head, WHICH, C)


@gluon.jit
def _store_rows(acc, out_ptr, out_stride, rows, last, kv_head, WHICH: gl.constexpr, C: gl.constexpr):
    LINES: gl.constexpr = _store_layout(C)
    numbers = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LINES)
    row_m = WHICH * N.value.half + gl.arange(0, N.value.half, layout=gl.SliceLayout(1, LINES))
    dim = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, LINES))
    is_row = row_m // C.group <= last
    token = gl.load(rows + row_m // C.group * 2, mask=is_row, other=0)
    place = token.to(gl.int64) * out_stride + (kv_head * C.group + row_m % C.group) * C.head_dim
    place = place[:, None] + dim[None, :]
    gl.store(out_ptr + place, numbers, mask=gl.broadcast(is_row[:, None], place)[0])


@gluon.jit
def _store_partials(
    acc, log_sum, partials_ptr, log_sums_ptr, start, last, kv_head, WHICH: gl.constexpr, C: gl.constexpr
):
    DIMS: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, DIMS)
    row_m = WHICH * N.value.half + gl.arange(0, N.value.half, layout=ROWS)
    dim = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, DIMS))
    is_row = row_m // C.group <= last
    slot = (start + row_m // C.group).to(gl.int64) * C.num_heads + kv_head * C.group + row_m % C.group
    gl.store(log_sums_ptr + slot, gl.convert_layout(log_sum, ROWS), mask=is_row)
    place = (slot * C.head_dim)[:, None] + dim[None, :]
    gl.store(partials_ptr + place, acc, mask=gl.broadcast(is_row[:, None], place)[0])


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM):
        mbarrier.init(found.index(index), count=COUNT)
    return found


@gluon.jit(do_not_specialize=["table_stride", "block_rows"])
def hopper_tiles_kernel(
    qkv_ptr, keys, values, out_ptr, partials_ptr, log_sums_ptr, table_ptr, plan_ptr,
    qkv_stride, out_stride, table_stride, block_rows, scale,
    C: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The long items, 4 warps a group; see ``long_tiles_kernel``.

    keys, values: descriptors of a layer's cache as rows [all, D], of tiles [block_size, 64]; a block is ``block_rows``
        rows behind the one before.
    """
    wait_for_previous(PDL)
    let_next_start(PDL)  # after the wait, for ``short_tiles_kernel``, which leaves it out
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    k_ring = gl.allocate_shared_memory(dtype, [C.num_stages, C.block_n, C.head_dim], SHARED)
    v_ring = gl.allocate_shared_memory(dtype, [C.num_stages, C.block_n, C.head_dim], SHARED)
    q_ring = gl.allocate_shared_memory(dtype, [2, C.block_m, C.head_dim], SHARED)
    k_full, v_full = _barriers(C.num_stages, 1), _barriers(C.num_stages, 1)
    k_empty, v_empty = _barriers(C.num_stages, 2), _barriers(C.num_stages, 2)
    q_full, q_empty = _barriers(2, N.value.query_threads), _barriers(2, 2)
    hopper.fence_async_shared()
    num_turns = num_turns_of(plan_ptr, C)
    rows_ptr = plan_ptr + gl.load(plan_ptr + N.value.rows_at)
    first_item = gl.load(plan_ptr + N.value.num_short)
    items_ptr = plan_ptr + gl.load(plan_ptr + N.value.items_at) + first_item * N.value.item_size
    source, to = (items_ptr, rows_ptr), (out_ptr, out_stride, partials_ptr, log_sums_ptr)
    rings, queries = (k_ring, v_ring), (q_full, q_empty)
    barriers = (k_full, k_empty, v_full, v_empty)
    blocks = (items_ptr, table_ptr, table_stride, block_rows, num_turns)
    group = (source, to, rings, barriers, queries, q_ring, num_turns, scale)
    gl.warp_specialize(
        [
            (_multiply, (group, gl.constexpr(0), C)),
            (_multiply, (group, gl.constexpr(1), C)),
            (copy_blocks, (keys, k_ring, k_full, k_empty, blocks, C)),
            (copy_blocks, (values, v_ring, v_full, v_empty, blocks, C)),
            (copy_queries, (qkv_ptr, qkv_stride, q_ring, q_full, q_empty, source, num_turns, C)),
        ],
        [N.value.group_warps, 1, 1, N.value.query_warps],
        [
            N.value.multiplying_registers,
            N.value.copying_registers,
            N.value.copying_registers,
            N.value.copying_registers,
        ],
    )
