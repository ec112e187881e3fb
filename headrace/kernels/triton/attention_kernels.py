"""Kernels of ``attention``: short tiles (decodes), long tiles (prompt chunks), and the merging of partials.

All query heads of one KV head are rows of one tile, so that K and V are read once for them. A short tile is bound by
the bandwidth of reading KV: many loads in flight. A long tile is bound by its matrix products: keys that every row
sees need no mask, so they are done in a loop of their own. Scores are kept in units of log2(e), so that exp2 serves.

Every kernel is a persistent grid over units of work (item and KV head). What the work is it reads from one int32
buffer, ``plan``: see ``headrace.kernels.triton.attention_work``.

Legend: H query heads, K KV heads, G = H / K, D head dim, B block size, M rows of a tile (query rows x G), N keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.attention_common import (
    FAR,
    HIDDEN,
    ITEM_SIZE,
    ITEMS_AT,
    KV_END,
    KV_START,
    LOG2_E,
    NUM_ITEMS,
    NUM_REDUCTIONS,
    NUM_SHORT,
    PARTIAL_START,
    REDUCE_ROWS_AT,
    REDUCE_SLOTS_AT,
    REDUCE_STARTS_AT,
    REQUEST,
    ROW_COUNT,
    ROW_START,
    ROWS_AT,
    block_place,
    first_key,
    load_ids,
    load_queries,
    place_of,
    scaled,
    store_tile,
)
from headrace.kernels.triton.launch import let_next_start, wait_for_previous
from headrace.kernels.triton.quantized_cache import decode_packed


@triton.jit
def _load_kv(start, offsets, dim, inside, C: tl.constexpr, IS_MASKED: tl.constexpr):
    """[N, D] keys or values, zero where a slot is not ``inside`` the range.

    Slots outside may hold anything, NaN included, which even a weight of zero would let into the result.
    """
    if IS_MASKED:
        mask = inside[:, None]
        if C.block_d != C.head_dim:
            mask = mask & (dim < C.head_dim)[None, :]
        return tl.load(start + offsets, mask=mask, other=0.0)
    elif C.block_d != C.head_dim:
        return tl.load(start + offsets, mask=(dim < C.head_dim)[None, :], other=0.0)
    else:
        return tl.load(start + offsets)


@triton.jit
def _load_packed(
    start, scales_ptr, place, slot, dim, inside, C: tl.constexpr, IS_MASKED: tl.constexpr, HAS_FIFTH: tl.constexpr,
):  # fmt: skip
    """[N, D] keys of 5 bits or values of 4, of the tokens whose codes begin at ``place``."""
    HALF: tl.constexpr = C.head_dim // 2
    codes = _load_kv(start, place[:, None] + (dim % HALF)[None, :], dim, inside, C, IS_MASKED)
    fifths = codes
    if HAS_FIFTH:
        offsets = place[:, None] + (HALF + (dim % HALF) // 4)[None, :]
        fifths = _load_kv(start, offsets, dim, inside, C, IS_MASKED)
    return decode_packed(codes, fifths, scales_ptr, slot, dim, inside, HALF, HAS_FIFTH)


@triton.jit
def _load_round(
    k_ptr, v_ptr, k_scales, v_scales, blocks, first, start, end, block_stride, scales_stride, C: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """(k [N, D], v [N, D], scale of each k [N], of each v [N]) of the keys from ``first`` on; scales of codes only."""
    dim = tl.arange(0, C.block_d)
    lane = tl.arange(0, C.block_n)
    key = first + lane
    inside = key < end
    if C.has_window:
        inside = inside & (key >= start)
    key_slot = (lane if C.has_whole_blocks else key) % C.block_size
    place = block_place(blocks, block_stride)
    k_place, v_place = place + key_slot * C.k_size, place + key_slot * C.v_size
    k_scale, v_scale = 0.0, 0.0
    if C.kv_kind != "":
        slot = block_place(blocks, scales_stride) + key_slot
    if C.is_scaled:
        k_scale = tl.load(k_scales + slot, mask=inside, other=0.0)
        v_scale = tl.load(v_scales + slot, mask=inside, other=0.0)
    if C.is_packed:
        k = _load_packed(k_ptr, k_scales, k_place, slot, dim, inside, C, IS_MASKED, True)
        v = _load_packed(v_ptr, v_scales, v_place, slot, dim, inside, C, IS_MASKED, False)
    elif C.has_whole_blocks:  # the pointers are those of the lanes' slots
        k = _load_kv(k_ptr, place[:, None], dim, inside, C, IS_MASKED)
        v = _load_kv(v_ptr, place[:, None], dim, inside, C, IS_MASKED)
    else:
        k = _load_kv(k_ptr, k_place[:, None] + dim[None, :], dim, inside, C, IS_MASKED)
        v = _load_kv(v_ptr, v_place[:, None] + dim[None, :], dim, inside, C, IS_MASKED)
    return k, v, k_scale, v_scale


@triton.jit
def _fold(
    q, top, total, acc, k, v, k_scale, v_scale, first, start, end, positions, scale, soft_cap, window,
    C: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """One round of the online softmax: (top [M], total [M], acc [M, D]) with the keys from ``first`` on."""
    product = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=C.precision)
    if C.is_scaled:
        product = product * k_scale[None, :]
    if IS_MASKED or C.has_soft_cap:
        score = scaled(product, scale, soft_cap, C)
        if IS_MASKED:
            key = first + tl.arange(0, C.block_n)
            inside = key < end
            if C.has_window:
                inside = inside & (key >= start)
            is_seen = (key[None, :] <= positions[:, None]) & inside[None, :]
            if C.has_window:
                is_seen = is_seen & (key[None, :] > positions[:, None] - window)
            score = tl.where(is_seen, score, HIDDEN)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - new_top[:, None])
    else:  # the scaling is part of the subtraction
        new_top = tl.maximum(top, tl.max(product, axis=1) * (scale * LOG2_E))
        weight = tl.exp2(product * (scale * LOG2_E) - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = acc * shrink[:, None]
    if C.is_scaled:
        weight = weight * v_scale[None, :]
    acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc, input_precision=C.precision)
    return new_top, total, acc


@triton.jit
def _attend(
    q, top, total, acc, k_ptr, v_ptr, k_scales, v_scales, table, positions, start, stop, end, block_stride,
    scales_stride, scale, soft_cap, window, C: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax of a tile over keys [start, stop), ``block_n`` at a time; those from ``end`` on do not exist.

    The block ids of the next keys are loaded one round ahead, so that the loads of K and V wait for no other load.
    What of an address does not change from round to round stands before the loop: it is half of the loop's integers.
    """
    begin = first_key(start, C)
    last = end if IS_MASKED else stop
    if C.has_whole_blocks and not C.is_packed:
        slot = tl.arange(0, C.block_n)[:, None] % C.block_size
        dim = tl.arange(0, C.block_d)[None, :]
        k_ptr = k_ptr + (slot * C.k_size + dim)
        v_ptr = v_ptr + (slot * C.v_size + dim)
    blocks = load_ids(table, begin, last, C, IS_MASKED)
    for first in tl.range(begin, stop, C.block_n, num_stages=C.num_stages):
        k, v, k_scale, v_scale = _load_round(
            k_ptr, v_ptr, k_scales, v_scales, blocks, first, start, end, block_stride, scales_stride, C, IS_MASKED
        )  # fmt: skip
        blocks = load_ids(table, first + C.block_n, last, C, IS_MASKED)
        top, total, acc = _fold(
            q, top, total, acc, k, v, k_scale, v_scale, first, start, end, positions, scale, soft_cap, window, C,
            IS_MASKED,
        )  # fmt: skip
    return top, total, acc


@triton.jit(do_not_specialize=["table_stride", "window", "is_beside_long"])
def short_tiles_kernel(
    qkv_ptr, k_ptr, v_ptr, out_ptr, partials_ptr, log_sums_ptr, table_ptr, plan_ptr,
    qkv_stride, out_stride, table_stride, block_stride, scale, soft_cap, window, is_beside_long,
    k_scales_ptr, v_scales_ptr, scales_stride, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The short items: tiles of few rows, so every round of keys is masked and none is cut at a row's end.

    is_beside_long: ``long_tiles_kernel`` was launched just before, which lets this one start when all that both read is
        there; so this one need not wait, but must not end before it does.
    """
    let_next_start(PDL)
    m, dim = tl.arange(0, C.block_m), tl.arange(0, C.block_d)
    row = m // C.group
    if is_beside_long == 0:
        wait_for_previous(PDL)
    rows_ptr = plan_ptr + tl.load(plan_ptr + ROWS_AT)
    items_ptr = plan_ptr + tl.load(plan_ptr + ITEMS_AT)
    num_units = tl.load(plan_ptr + NUM_SHORT) * C.num_kv_heads
    for turn in range(tl.cdiv(num_units, tl.num_programs(0))):
        place = place_of(turn)
        unit = tl.minimum(place, num_units - 1)
        item = items_ptr + (unit // C.num_kv_heads) * ITEM_SIZE
        kv_head = unit % C.num_kv_heads
        table = table_ptr + tl.load(item + REQUEST).to(tl.int64) * table_stride
        start = tl.load(item + KV_START)
        end = tl.where(place < num_units, tl.load(item + KV_END), 0)
        is_row = (row < tl.load(item + ROW_COUNT)) & (place < num_units)
        head = kv_head * C.group + m % C.group
        token, positions, q = load_queries(
            qkv_ptr, qkv_stride, rows_ptr, tl.load(item + ROW_START), row, head, is_row, dim, C
        )
        top = tl.full([C.block_m], HIDDEN, tl.float32)
        total = tl.full([C.block_m], 0.0, tl.float32)
        acc = tl.full([C.block_m, C.block_d], 0.0, tl.float32)
        k_start = k_ptr + kv_head * C.k_stride
        v_start = v_ptr + kv_head * C.v_stride
        k_scales = k_scales_ptr + kv_head * C.k_plane_scales
        v_scales = v_scales_ptr + kv_head * C.v_plane_scales
        full_end = start
        if not C.has_window:  # rounds that every row sees as a whole need no masks
            lowest = tl.min(tl.where(is_row, positions, FAR))
            full_end = start + tl.maximum(tl.minimum(end, lowest + 1) - start, 0) // C.block_n * C.block_n
            top, total, acc = _attend(
                q, top, total, acc, k_start, v_start, k_scales, v_scales, table, positions, start, full_end, end,
                block_stride, scales_stride, scale, soft_cap, window, C, False,
            )  # fmt: skip
        top, total, acc = _attend(
            q, top, total, acc, k_start, v_start, k_scales, v_scales, table, positions, full_end, end, end,
            block_stride, scales_stride, scale, soft_cap, window, C, True,
        )  # fmt: skip
        store_tile(
            acc, top, total, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row, head, is_row,
            tl.load(item + PARTIAL_START), dim, C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "window", "num_subtiles"])
def long_tiles_kernel(
    qkv_ptr, k_ptr, v_ptr, out_ptr, partials_ptr, log_sums_ptr, table_ptr, plan_ptr,
    qkv_stride, out_stride, table_stride, block_stride, scale, soft_cap, window, num_subtiles,
    k_scales_ptr, v_scales_ptr, scales_stride, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The other items, each in subtiles of ``block_m`` rows.

    Three loops over a subtile's keys: where the window begins, where all rows see all keys, where their views end.
    """
    m, dim = tl.arange(0, C.block_m), tl.arange(0, C.block_d)
    wait_for_previous(PDL)
    let_next_start(PDL)  # after the wait, for ``short_tiles_kernel``, which leaves it out
    rows_ptr = plan_ptr + tl.load(plan_ptr + ROWS_AT)
    items_ptr = plan_ptr + tl.load(plan_ptr + ITEMS_AT)
    first_item = tl.load(plan_ptr + NUM_SHORT)
    units_per_item = num_subtiles * C.num_kv_heads
    num_units = (tl.load(plan_ptr + NUM_ITEMS) - first_item) * units_per_item
    for turn in range(tl.cdiv(num_units, tl.num_programs(0))):
        place = place_of(turn)
        unit = tl.minimum(place, num_units - 1)
        item = items_ptr + (first_item + unit // units_per_item) * ITEM_SIZE
        kv_head = unit % C.num_kv_heads
        row_m = (unit % units_per_item) // C.num_kv_heads * C.block_m + m
        row = row_m // C.group
        is_row = row < tl.load(item + ROW_COUNT)
        if place < num_units and tl.min(row) < tl.load(item + ROW_COUNT):
            table = table_ptr + tl.load(item + REQUEST).to(tl.int64) * table_stride
            start = tl.load(item + KV_START)
            end = tl.load(item + KV_END)
            head = kv_head * C.group + row_m % C.group
            token, positions, q = load_queries(
                qkv_ptr, qkv_stride, rows_ptr, tl.load(item + ROW_START), row, head, is_row, dim, C
            )
            lowest = tl.min(tl.where(is_row, positions, FAR))
            highest = tl.max(positions)
            end = tl.minimum(end, highest + 1)
            full_start = start
            if C.has_window:
                start = tl.maximum(start, lowest - window + 1)
                begin = first_key(start, C)
                rounds = tl.cdiv(tl.maximum(highest - window + 1 - begin, 0), C.block_n)
                full_start = begin + rounds * C.block_n
            full_rounds = tl.maximum(tl.minimum(end, lowest + 1) - full_start, 0) // C.block_n
            full_end = full_start + full_rounds * C.block_n
            top = tl.full([C.block_m], HIDDEN, tl.float32)
            total = tl.full([C.block_m], 0.0, tl.float32)
            acc = tl.full([C.block_m, C.block_d], 0.0, tl.float32)
            k_start = k_ptr + kv_head * C.k_stride
            v_start = v_ptr + kv_head * C.v_stride
            k_scales = k_scales_ptr + kv_head * C.k_plane_scales
            v_scales = v_scales_ptr + kv_head * C.v_plane_scales
            if C.has_window:
                top, total, acc = _attend(
                    q, top, total, acc, k_start, v_start, k_scales, v_scales, table, positions, start,
                    tl.minimum(full_start, end), end, block_stride, scales_stride, scale, soft_cap, window, C, True,
                )  # fmt: skip
            top, total, acc = _attend(
                q, top, total, acc, k_start, v_start, k_scales, v_scales, table, positions, full_start, full_end, end,
                block_stride, scales_stride, scale, soft_cap, window, C, False,
            )  # fmt: skip
            top, total, acc = _attend(
                q, top, total, acc, k_start, v_start, k_scales, v_scales, table, positions, full_end, end, end,
                block_stride, scales_stride, scale, soft_cap, window, C, True,
            )  # fmt: skip
            store_tile(
                acc, top, total, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row, head, is_row,
                tl.load(item + PARTIAL_START), dim, C,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_heads"])
def merge_kernel(
    partials_ptr, log_sums_ptr, out_ptr, plan_ptr, out_stride, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each (row, head) of the reductions: its partials, weighted by their share of the whole sum, in slot order."""
    let_next_start(PDL)
    dim = tl.arange(0, BLOCK_D)
    in_dim = dim < HEAD_DIM
    wait_for_previous(PDL)
    reduce_rows_ptr = plan_ptr + tl.load(plan_ptr + REDUCE_ROWS_AT)
    reduce_starts_ptr = plan_ptr + tl.load(plan_ptr + REDUCE_STARTS_AT)
    reduce_slots_ptr = plan_ptr + tl.load(plan_ptr + REDUCE_SLOTS_AT)
    num_units = tl.load(plan_ptr + NUM_REDUCTIONS) * num_heads
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        merge = unit // num_heads
        head = unit % num_heads
        end = tl.load(reduce_starts_ptr + merge + 1)
        top = HIDDEN
        total = 0.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for first in range(tl.load(reduce_starts_ptr + merge), end, BLOCK_P):
            index = first + tl.arange(0, BLOCK_P)
            inside = index < end
            slot = tl.load(reduce_slots_ptr + index, mask=inside, other=0).to(tl.int64) * num_heads + head
            log_sum = tl.load(log_sums_ptr + slot, mask=inside, other=HIDDEN)
            part = tl.load(
                partials_ptr + slot[:, None] * HEAD_DIM + dim[None, :],
                mask=inside[:, None] & in_dim[None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(log_sum, axis=0))
            weight = tl.where(inside, tl.exp2(log_sum - new_top), 0.0)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weight, axis=0)
            acc = acc * shrink + tl.sum(part * weight[:, None], axis=0)
            top = new_top
        place = out_ptr + tl.load(reduce_rows_ptr + merge).to(tl.int64) * out_stride + head * HEAD_DIM + dim
        tl.store(place, (acc / total).to(out_ptr.dtype.element_ty), mask=in_dim)
