"""Roles of the warps that copy keys, values and queries for ``hopper_tiles_kernel``; what all roles have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.triton import attention_common as common
from headrace.kernels.triton.gluon_names import async_load, tensor_load
from headrace.kernels.triton.ring_slots import next_slot

SPAN = 64
"""Numbers of a row that lie together in shared memory: a tile [n, D] is D / 64 tiles [n, 64]."""


@dataclass(frozen=True, slots=True)
class Names:
    """What the kernel's functions have in common, in one global: a launch compares each global with what it was."""

    num_items: int = common.NUM_ITEMS.value
    num_short: int = common.NUM_SHORT.value
    rows_at: int = common.ROWS_AT.value
    items_at: int = common.ITEMS_AT.value
    item_size: int = common.ITEM_SIZE.value
    request: int = common.REQUEST.value
    kv_start: int = common.KV_START.value
    kv_end: int = common.KV_END.value
    row_start: int = common.ROW_START.value
    row_count: int = common.ROW_COUNT.value
    partial_start: int = common.PARTIAL_START.value
    lowest_top: float = common.HIDDEN.value
    hidden: float = -math.inf
    log2_e: float = common.LOG2_E.value
    far: int = common.FAR.value
    span: int = SPAN
    half: int = 64
    group_warps: int = 4
    query_warps: int = 2
    query_threads: int = 64
    multiplying_registers: int = 240
    copying_registers: int = 24


N = gl.constexpr(Names())
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def num_turns_of(plan_ptr, C: gl.constexpr):
    """How many units this program has; see ``unit_of``."""
    num_items = gl.load(plan_ptr + N.value.num_items) - gl.load(plan_ptr + N.value.num_short)
    num_units = num_items * C.num_kv_heads
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    whole = num_units // num_programs
    last = gl.where(whole % 2 == 0, program, num_programs - 1 - program)
    return whole + (last < num_units % num_programs).to(gl.int32)


@gluon.jit
def unit_of(items_ptr, turn, C: gl.constexpr):
    """(item, KV head) of a turn: as ``attention_common.place_of``."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    unit = turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)
    return items_ptr + unit // C.num_kv_heads * N.value.item_size, unit % C.num_kv_heads


@gluon.jit
def num_rounds_of(start, end, C: gl.constexpr):
    """Of an item with keys [start, end); one at least."""
    return gl.maximum(gl.cdiv(end - start, C.block_n), 1)


@gluon.jit
def copy_blocks(cache, ring, full, empty, blocks, C: gl.constexpr):
    """The role of a warp that fills a ring [stages, N, D] with keys, or with values, of one round after the other.

    cache: descriptor of the rows [all, D] of the cache, whose blocks are ``block_rows`` apart. A block beyond the end
        is one beyond the cache, which reads as zeros.
    """
    items_ptr, table_ptr, table_stride, block_rows, num_turns = blocks
    SPANS: gl.constexpr = C.head_dim // N.value.span
    BLOCKS: gl.constexpr = C.block_n // C.block_size
    tiles = ring._reinterpret(ring.dtype, [C.num_stages * SPANS * BLOCKS, C.block_size, N.value.span], SHARED)
    slot, phase = 0, 1  # a slot that nobody has used is waited for with the parity of the phase before
    for turn in range(num_turns):
        item, kv_head = unit_of(items_ptr, turn, C)
        start, end = gl.load(item + N.value.kv_start), gl.load(item + N.value.kv_end)
        rounds = num_rounds_of(start, end, C)
        table = table_ptr + gl.load(item + N.value.request).to(gl.int64) * table_stride
        for index in range(rounds):
            first = start + (rounds - 1 - index) * C.block_n
            entry = table + first // C.block_size
            rows = ()
            for block in gl.static_range(BLOCKS):
                is_inside = first + block * C.block_size < end
                number = gl.load(entry + block, mask=is_inside, other=0)
                row = gl.where(is_inside, number * block_rows + kv_head * C.block_size, 0x7FFFFF00)
                rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), C.block_n * C.head_dim * 2)
            for block in gl.static_range(BLOCKS):
                for span in gl.static_range(SPANS):
                    tile = tiles.index((slot * SPANS + span) * BLOCKS + block)
                    tensor_load(cache, [rows[block], span * N.value.span], full.index(slot), tile)
            slot, phase = next_slot(slot, phase, C.num_stages)


@gluon.constexpr_function
def _query_copy():
    """Eight numbers a thread of [16, 64]."""
    return gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])


@gluon.jit
def copy_queries(qkv_ptr, qkv_stride, q_ring, full, empty, source, num_turns, C: gl.constexpr):
    """The role of the warps that bring the queries [M, D] of each unit, while the one before is computed; a tile's last
    row again where it has fewer."""
    items_ptr, rows_ptr = source
    LAYOUT: gl.constexpr = _query_copy()
    SPANS: gl.constexpr = C.head_dim // N.value.span
    PARTS: gl.constexpr = C.block_m // 16
    tiles = q_ring._reinterpret(q_ring.dtype, [2 * SPANS * PARTS, 16, N.value.span], SHARED)
    m = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, N.value.span, layout=gl.SliceLayout(0, LAYOUT))
    for turn in range(num_turns):
        item, kv_head = unit_of(items_ptr, turn, C)
        rows = rows_ptr + gl.load(item + N.value.row_start) * 2
        last = gl.load(item + N.value.row_count) - 1
        slot = turn & 1
        mbarrier.wait(empty.index(slot), (turn >> 1 & 1) ^ 1)
        for part in range(PARTS):
            row_m = m + part * 16
            token = gl.load(rows + gl.minimum(row_m // C.group, last) * 2)
            head = kv_head * C.group + row_m % C.group
            place = token.to(gl.int64) * qkv_stride + head * C.head_dim
            for span in gl.static_range(SPANS):
                start = qkv_ptr + (place[:, None] + (span * N.value.span + dim)[None, :])
                async_load(tiles.index((slot * SPANS + span) * PARTS + part), start)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
