"""Tiles of 4-bit weights in the ring, and products of one row by the matrix units.

A tile is 16 or 32 rows of the matrix; each warp has whole chunks of its columns (``WordMatrix``). Codes become
numbers by bits (128 + code is a bf16 number whose fraction is the code, 1024 + code an fp16 one) and are multiplied
as they are, 16 x 16 at a time, with x as the only column that is not zero. Which of the eight columns that is depends
on the group of 32 inputs, so that sums of eight groups come out side by side and each takes its scale once. The order
of inputs within a product is free, so a thread's words for it are neighbours.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from headrace.kernels.triton.gluon_names import async_load
from headrace.kernels.triton.packed_ring_config import BAND, CHUNK, GROUP
from headrace.kernels.triton.weight_ring import (
    FLAT,
    NUM_WARPS,
    advance,
    finish_rows,
    select,
)
from headrace.kernels.triton.word_matrix import CHUNK_WORDS

_NUM_WARPS, _CHUNK, _GROUP = gl.constexpr(NUM_WARPS), gl.constexpr(CHUNK), gl.constexpr(GROUP)
_COPIES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [NUM_WARPS, 1], [1, 0]))
"""A warp copies 512 bytes of a row."""
_WORDS = gl.constexpr(gl.SwizzledSharedLayout(CHUNK_WORDS, 1, 2, [1, 0]))
"""Rows of a tile lie a multiple of 128 bytes apart; with every other's chunks exchanged, two rows' fill all banks."""
_POWERS = [1 << bit for bit in range(NUM_WARPS.bit_length() - 1)]
LANES = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 32, 1], [NUM_WARPS, 1, 1], [2, 1, 0]))
"""[warps, 32, 4]: four numbers a thread."""
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.constexpr_function
def scale_type(R):
    """Of scales and minimums."""
    return gl.float16 if R.scale_bytes == 2 else gl.float32


@gluon.constexpr_function
def _scale_copies(R):
    """[warps, groups, rows]: 16 bytes a thread."""
    each = 16 // R.scale_bytes
    lanes = R.num_rows // each
    return gl.BlockedLayout(
        [1, 1, each],
        [max(32 // (R.groups * lanes), 1), min(R.groups, 32 // lanes), lanes],
        [NUM_WARPS, 1, 1],
        [2, 1, 0],
    )


@gluon.constexpr_function
def _scale_loads(R):
    """[1, warps, 8 groups, rows]: those of the sums that a thread has; of four groups [2, warps, 4, rows], twice."""
    last = [0, 0, 4, 0] if R.chunks == 2 else [1, 0, 0, 0]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1, 0], [0, 0, 0, 8]] + [[0, 0, 0, BAND]] * (R.bands - 1),
        lane_bases=[[0, 0, 2, 0], last, [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        warp_bases=[[0, times, 0, 0] for times in _POWERS],
        block_bases=[],
        shape=[3 - R.chunks, NUM_WARPS, R.groups, R.num_rows],
    )


@gluon.constexpr_function
def _word_loads(R):
    """[rows, words]: a thread has four neighbours of rows g and g + 8 of each band and chunk."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]]
        + [[BAND, 0]] * (R.bands - 1)
        + [[0, CHUNK_WORDS]] * (R.chunks - 1),
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, times * CHUNK_WORDS * R.chunks] for times in _POWERS],
        block_bases=[],
        shape=[R.num_rows, R.block_k // 8],
    )


@gluon.constexpr_function
def _x_loads(R):
    """[2, inputs of a tile], or [1, ...]: two planes of four numbers of the lane's group of columns. Where a warp has
    one chunk, eight groups are its four twice."""
    chunks = R.chunks
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16]],
        lane_bases=[[0, 4], [0, 8], [0, 32], [0, 64], [0, 128] if chunks == 2 else [1, 0]],
        warp_bases=[[0, times * CHUNK * chunks] for times in _POWERS],
        block_bases=[],
        shape=[3 - chunks, R.block_k],
    )


@gluon.jit
def make_packed_ring(R: gl.constexpr):
    """Words, scales and minimums of each slot, in shared memory."""
    words = gl.allocate_shared_memory(gl.int32, [R.num_slots, R.num_rows, R.block_k // 8], _WORDS)
    kind: gl.constexpr = scale_type(R)
    scales = gl.allocate_shared_memory(kind, [R.num_slots, _NUM_WARPS, R.groups, R.num_rows], _SCALES)
    minimums = scales
    if R.has_minimums:
        minimums = gl.allocate_shared_memory(kind, [R.num_slots, _NUM_WARPS, R.groups, R.num_rows], _SCALES)
    return words, scales, minimums


@gluon.jit
def _copy_scales(target, pointer, group_0, first, steps, stride, inside, R: gl.constexpr):
    """Scales of a tile's rows and groups, from bytes at ``pointer``."""
    LAYOUT: gl.constexpr = _scale_copies(R)
    kind: gl.constexpr = scale_type(R)
    band_step, half_step = steps
    warp = gl.arange(0, _NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    part = gl.arange(0, R.groups, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]
    row = gl.arange(0, R.num_rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]
    column = group_0 + warp * (_CHUNK * R.chunks) + part * _GROUP
    if R.group == 0:
        group = column * 0
    else:
        group = column // R.group
    away = group * stride + (row // 16 * band_step + row // 8 % 2 * half_step + row % 8)
    start = pointer.to(gl.pointer_type(kind), bitcast=True) + first
    async_load(target, start + away, mask=gl.broadcast(inside, away)[0])


@gluon.jit
def ask_packed(ring, place, weights_ptr, C: gl.constexpr, R: gl.constexpr):
    """As ``ask_next``: words, scales and minimums of a tile.

    Row 16 b + 8 h + g of a tile is so many behind the first; where two matrices share it, h says whose line 8 b + g.
    """
    words, scales, minimums = ring
    slot, layer, part, tile, round, offset, _ = place
    k = gl.multiple_of(select(part, R.units(0), R.units(1), R.units(2), R.units(3)) * 2, 16)  # words of a row
    n = select(part, R.outputs[0], R.outputs[1], R.outputs[2], R.outputs[3])
    is_pair = part == 2
    steps = (gl.where(is_pair, 8, 16), gl.where(is_pair, n, 8))
    first = (gl.program_id(0) + tile * gl.num_programs(0)) * gl.where(is_pair, R.num_rows // 2, R.num_rows)
    first = gl.multiple_of(first, 8)
    inside = (first < n) & (layer < C.num_layers)
    row = gl.arange(0, R.num_rows, layout=gl.SliceLayout(1, _COPIES))[:, None]
    word = gl.arange(0, R.block_k // 8, layout=gl.SliceLayout(0, _COPIES))[None, :]
    start = weights_ptr + offset * 16 + (first.to(gl.int64) * k + round * (R.block_k // 8))
    away = (row // 16 * steps[0] + row // 8 % 2 * steps[1] + row % 8) * k + word
    async_load(words.index(slot), start + away, mask=gl.broadcast(inside, away)[0])
    stride = gl.multiple_of(select(part, R.strides[0], R.strides[1], R.strides[2], R.strides[3]), 16)
    matrix = (weights_ptr + offset * 16).to(gl.pointer_type(gl.int8), bitcast=True)
    after = select(part, R.scales_after[0], R.scales_after[1], R.scales_after[2], R.scales_after[3])
    matrix_scales, group_0 = matrix + gl.multiple_of(after, 16), round * R.block_k
    _copy_scales(scales.index(slot), matrix_scales, group_0, first, steps, stride, inside, R)
    if R.has_minimums:
        after = select(
            part, R.minimums_after[0], R.minimums_after[1], R.minimums_after[2], R.minimums_after[3]
        )
        matrix_minimums = matrix + gl.multiple_of(after, 16)
        _copy_scales(minimums.index(slot), matrix_minimums, group_0, first, steps, stride, inside, R)
    async_copy.commit_group()


@gluon.jit
def _load_scales(ring, slot, R: gl.constexpr):
    """Of each band: fp32 [warps, 32, 4], as its sums lie."""
    LAYOUT: gl.constexpr = _scale_loads(R)
    s = ring.index(slot).load(gl.SliceLayout(0, LAYOUT)).to(gl.float32)
    s = s[None, :, :, :] + gl.full([3 - R.chunks, _NUM_WARPS, R.groups, R.num_rows], 0.0, gl.float32, LAYOUT)
    s = s.reshape([3 - R.chunks, _NUM_WARPS, R.groups // 2, 2, R.bands, 2, 8]).permute((1, 6, 0, 2, 5, 3, 4))
    if R.bands == 1:
        found = (_as_lanes(s),)
    else:
        first, second = gl.split(s)
        found = (_as_lanes(first), _as_lanes(second))  # type: ignore[assignment]
    return found


@gluon.jit
def _load_x(x_view, round, R: gl.constexpr):
    """([warps, 32, 4], [warps, 32, 4]) int32: the numbers of two planes of the lane's group, in low halves."""
    LAYOUT: gl.constexpr = _x_loads(R)
    rows = x_view._reinterpret(x_view.dtype, [R.block_inputs // R.block_k, R.block_k], FLAT)
    x = rows.index(round).load(gl.SliceLayout(0, LAYOUT)).to(gl.uint16, bitcast=True).to(gl.int32)
    zeros = gl.full([3 - R.chunks, R.block_k], 0, gl.int32, LAYOUT)
    x = (x[None, :] + zeros).reshape([3 - R.chunks, _NUM_WARPS, R.chunks, 4, 2, 4, 4])
    first, second = gl.split(x.permute((1, 0, 2, 3, 5, 6, 4)))
    return _as_lanes(first), _as_lanes(second)


@gluon.jit
def _as_lanes(x):
    """[warps, 32, 4], four numbers a thread, which they are already."""
    return gl.convert_layout(x.reshape([_NUM_WARPS, 32, 4]), LANES, assert_trivial=True)


@gluon.jit
def _load_words(ring, slot, R: gl.constexpr):
    """Of each chunk and band: a thread's words of row g, and of row g + 8; [warps, 32, 4] each."""
    words = ring.index(slot).load(_word_loads(R))
    words = words.reshape([R.bands, 2, 8, _NUM_WARPS, R.chunks, 4, 4]).permute((3, 2, 5, 6, 4, 0, 1))
    VECTORS: gl.constexpr = R.vectors
    found = _halves((words.reshape([_NUM_WARPS, 32, 4, VECTORS]),), 1, VECTORS)
    if VECTORS >= 4:
        found = _halves(found, 2, VECTORS // 2)
    if VECTORS >= 8:
        found = _halves(found, 4, VECTORS // 4)
    lanes = ()
    for index in gl.static_range(VECTORS):
        lanes = lanes + (_as_lanes(found[index]),)  # type: ignore[assignment]  # noqa: RUF005
    return lanes


@gluon.jit
def _halves(parts, COUNT: gl.constexpr, VECTORS: gl.constexpr):
    """Each [..., VECTORS] of a tuple as two of half as many, in order."""
    found = ()
    for index in gl.static_range(COUNT):
        part = parts[index].reshape([_NUM_WARPS, 32, 4, 2, VECTORS // 2])
        first, second = gl.split(part.permute((0, 1, 2, 4, 3)))
        found = found + (first, second)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def packed_product(
    flow, slot, place, scale, out_ptrs, PART: gl.constexpr, NUM_OUTS: gl.constexpr, C: gl.constexpr, R: gl.constexpr
):  # fmt: skip
    """As ``product``, of packed weights."""
    ring, x_view, counts, weights_ptr, places_ptr = flow
    words, scales, minimums = ring
    dtype: gl.constexpr = x_view.dtype
    for tile in range(counts[PART]):
        acc_0 = gl.full([_NUM_WARPS, 32, 4], 0.0, gl.float32, LANES)
        acc_1 = acc_0
        for round in range(R.rounds(PART)):
            following = advance(place, counts, places_ptr, C, R)
            async_copy.wait_group(R.num_slots - 1)
            operands = _load_words(words, slot, R) + _load_x(x_view, round, R)
            factors = _load_scales(scales, slot, R)
            floors = factors
            if R.has_minimums:
                floors = _load_scales(minimums, slot, R)
            ask_packed(ring, place, weights_ptr, C, R)
            place = following
            slot = gl.where(slot == R.num_slots - 1, 0, slot + 1)
            sums = gl.inline_asm_elementwise(
                R.product_ptx, R.product_constraints, operands, dtype=R.product_types, is_pure=False, pack=4
            )
            acc_0 += sums[0] * factors[0]
            if R.bands == 2:
                acc_1 += sums[1] * factors[1]
            if R.has_minimums:
                acc_0 += sums[R.bands] * floors[0]
                if R.bands == 2:
                    acc_1 += sums[R.bands] * floors[1]
        y = _sum_rows(acc_0, acc_1, PART, R) * scale
        finish_rows(y, tile, out_ptrs, out_ptrs[0], dtype, PART, NUM_OUTS, False, C, R)
    return slot, place


@gluon.jit
def _sum_rows(acc_0, acc_1, PART: gl.constexpr, R: gl.constexpr):
    """fp32 [rows]: the sums over warps and groups; where two matrices share the tile, those of the first come first."""
    if R.bands == 1:
        rows = acc_0.reshape([_NUM_WARPS, 8, 4, 2, 2]).permute((3, 1, 0, 2, 4))
    else:
        rows = gl.join(acc_0, acc_1).reshape([_NUM_WARPS, 8, 4, 2, 2, 2])
        if PART == 2:
            rows = rows.permute((3, 5, 1, 0, 2, 4))
        else:
            rows = rows.permute((5, 3, 1, 0, 2, 4))
    return gl.sum(rows.reshape([R.num_rows, _NUM_WARPS * 8]), axis=1)
