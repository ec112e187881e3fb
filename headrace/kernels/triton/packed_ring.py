"""Tiles of 4-bit weights in the ring, and products of one row by the matrix units.

A tile is 16 or 32 rows of the matrix; each warp has whole chunks of its columns (``WordMatrix``). The matrix units
multiply bytes: codes are made signed bytes by one or two instructions for four of them, x is two digits of 8 bits
times a power of two for each group of 32 inputs (``digits_of_row``). Of eight columns, two are the digits of each of
four groups, so that their sums come out side by side and each takes its scale once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.triton.packed_copies import num_tiles
from headrace.kernels.triton.packed_ring_config import CHUNK
from headrace.kernels.triton.ring_slots import next_slot
from headrace.kernels.triton.weight_ring import FLAT, NUM_WARPS, ROWS, finish_rows
from headrace.kernels.triton.word_matrix import CHUNK_WORDS

_NUM_WARPS = gl.constexpr(NUM_WARPS)
_POWERS = [1 << bit for bit in range(NUM_WARPS.bit_length() - 1)]
LANES = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 32, 1], [NUM_WARPS, 1, 1], [2, 1, 0]))
"""[warps, 32, 4]: four numbers a thread."""


@gluon.constexpr_function
def _sums(R):
    """[warps, groups, rows, digits]: a thread has its rows' sums of a group of each chunk."""
    rows = R.lane_rows
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 1, 0]]
        + [[0, 0, 2, 0]] * (R.bands - 1)
        + [[0, 4, 0, 0]] * (R.chunks - 1),
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0]] + [[0, 0, times * rows, 0] for times in (1, 2, 4)],
        warp_bases=[[times, 0, 0, 0] for times in _POWERS],
        block_bases=[],
        shape=[NUM_WARPS, R.groups, R.num_rows, 2],
    )


@gluon.constexpr_function
def _word_loads(R):
    """[rows, words]: a thread has four neighbours of each of its rows and chunks."""
    rows = R.lane_rows
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0]] + [[2, 0]] * (R.bands - 1) + [[0, CHUNK_WORDS]] * (R.chunks - 1),
        lane_bases=[[0, 4], [0, 8]] + [[times * rows, 0] for times in (1, 2, 4)],
        warp_bases=[[0, times * CHUNK_WORDS * R.chunks] for times in _POWERS],
        block_bases=[],
        shape=[R.num_rows, R.block_k // 8],
    )


@gluon.constexpr_function
def _x_loads(R):
    """[2, pairs of inputs of a tile]: two planes of four inputs of the lane's group of each chunk, for either digit."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8]] + [[0, CHUNK // 2]] * (R.chunks - 1),
        lane_bases=[[0, 2], [0, 4], [1, 0], [0, 16], [0, 32]],
        warp_bases=[[0, times * CHUNK // 2 * R.chunks] for times in _POWERS],
        block_bases=[],
        shape=[2, R.block_k // 2],
    )


@gluon.jit
def _load_scales(ring, slot, factors, round, R: gl.constexpr):
    """Of each chunk and band: fp32 [warps, 32, 4], as its sums lie; scales times what x's groups have.

    factors: fp32 [groups of x] in shared memory.
    """
    LAYOUT: gl.constexpr = _sums(R)
    GROUPS: gl.constexpr = R.groups
    s = ring.index(slot).load(gl.SliceLayout(3, LAYOUT)).to(gl.float32)
    rows = factors._reinterpret(gl.float32, [R.row_rounds, _NUM_WARPS, GROUPS], ROWS)
    s *= rows.index(round).load(gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))[:, :, None]
    s = s[:, :, :, None] + gl.full([_NUM_WARPS, GROUPS, R.num_rows, 2], 0.0, gl.float32, LAYOUT)
    s = s.reshape([_NUM_WARPS, R.chunks, 4, 8, R.bands, 2, 2]).permute((0, 3, 2, 5, 6, 1, 4))
    return _in_lanes(s.reshape([_NUM_WARPS, 32, 4, R.blocks]), R.blocks)


@gluon.jit
def _load_x(x, round, R: gl.constexpr):
    """Of each chunk: int32 [warps, 32, 4], the digits of two neighbouring inputs in each."""
    LAYOUT: gl.constexpr = _x_loads(R)
    rows = x._reinterpret(gl.int32, [R.row_rounds, R.block_k // 2], FLAT)
    found = rows.index(round).load(gl.SliceLayout(0, LAYOUT))
    found = found[None, :] + gl.full([2, R.block_k // 2], 0, gl.int32, LAYOUT)
    found = found.reshape([2, _NUM_WARPS, R.chunks, 4, 2, 4, 2]).permute((1, 3, 0, 5, 4, 6, 2))
    return _in_lanes(found.reshape([_NUM_WARPS, 32, 4, R.chunks]), R.chunks)


@gluon.jit
def _chosen_bytes():
    """int32 [warps, 32, 4]: where ``product_ptx`` takes digits from, of the first or second of two inputs."""
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, LANES)))[None, :][:, :, None]
    second = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LANES)))[None, :][None, :, :] % 2
    byte = 5 + 2 * second - lane // 4 % 2  # 4: no byte of x, but zero
    return (0x4444 ^ (byte << (lane // 8 * 4))) + gl.full([_NUM_WARPS, 32, 4], 0, gl.int32, LANES)


@gluon.jit
def _as_lanes(x):
    """[warps, 32, 4], four numbers a thread, which they are already."""
    return gl.convert_layout(x.reshape([_NUM_WARPS, 32, 4]), LANES, assert_trivial=True)


@gluon.jit
def _load_words(ring, slot, R: gl.constexpr):
    """Of each chunk, band and half of it: int32 [warps, 32, 4], a thread's words of a row."""
    words = ring.index(slot).load(_word_loads(R))
    words = words.reshape([8, R.bands, 2, _NUM_WARPS, R.chunks, 4, 4]).permute((3, 0, 5, 6, 4, 1, 2))
    return _in_lanes(words.reshape([_NUM_WARPS, 32, 4, R.blocks * 2]), R.blocks * 2)


@gluon.jit
def _in_lanes(x, COUNT: gl.constexpr):
    """[warps, 32, 4, COUNT] as so many [warps, 32, 4], COUNT being at most 8."""
    found = (x,)
    if COUNT >= 2:
        found = _halves(found, 1, COUNT)
    if COUNT >= 4:
        found = _halves(found, 2, COUNT // 2)
    if COUNT >= 8:
        found = _halves(found, 4, COUNT // 4)
    lanes = ()
    for index in gl.static_range(COUNT):
        lanes = lanes + (_as_lanes(found[index]),)  # type: ignore[assignment]  # noqa: RUF005
    return lanes


@gluon.jit
def _halves(parts, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """Each [..., WIDTH] of a tuple as two of half as many, in order."""
    found = ()
    for index in gl.static_range(COUNT):
        part = parts[index].reshape([_NUM_WARPS, 32, 4, 2, WIDTH // 2])
        first, second = gl.split(part.permute((0, 1, 2, 4, 3)))
        found = found + (first, second)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def packed_product(
    flow, slot, phase, scale, out_ptrs, PART: gl.constexpr, NUM_OUTS: gl.constexpr, C: gl.constexpr, R: gl.constexpr
):  # fmt: skip
    """As ``product``, of packed weights that others copy.

    flow: (ring, the row in shared memory).  slot, phase: of the first tile.  Returns: those of the next.
    """
    ring, row = flow
    words, scales, minimums, full, empty = ring
    x, factors, x_sums = row
    chosen = (_chosen_bytes(),)
    for tile in range(num_tiles(PART, R)):
        acc_0 = gl.full([_NUM_WARPS, 32, 4], 0.0, gl.float32, LANES)
        acc_1 = acc_0
        for round in range(R.rounds(PART)):
            mbarrier.wait(full.index(slot), phase)
            operands = _load_words(words, slot, R) + _load_x(x, round, R) + chosen
            weights = _load_scales(scales, slot, factors, round, R)
            floors = weights
            if R.has_minimums:
                floors = _load_scales(minimums, slot, x_sums, round, R)
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, R.num_slots)
            sums = gl.inline_asm_elementwise(
                R.product_ptx, R.product_constraints, operands, dtype=R.product_types, is_pure=False, pack=4
            )
            acc_0, acc_1 = _add(acc_0, acc_1, sums, weights, floors, R)
        y = _sum_rows(acc_0, acc_1, PART, R) * scale
        dtype: gl.constexpr = out_ptrs[0].dtype.element_ty
        finish_rows(y, tile, out_ptrs, out_ptrs[0], dtype, PART, NUM_OUTS, False, C, R)
    return slot, phase


@gluon.jit
def _add(acc_0, acc_1, sums, weights, floors, R: gl.constexpr):
    """The sums of either band."""
    CHUNKS: gl.constexpr = R.chunks
    BANDS: gl.constexpr = R.bands
    for chunk in gl.static_range(CHUNKS):
        acc_0 += sums[chunk * BANDS] * weights[chunk * BANDS]
        if R.bands == 2:
            acc_1 += sums[chunk * BANDS + 1] * weights[chunk * BANDS + 1]
        if R.has_minimums:
            acc_0 += floors[chunk * BANDS]
            if R.bands == 2:
                acc_1 += floors[chunk * BANDS + 1]
    return acc_0, acc_1


@gluon.jit
def _sum_rows(acc_0, acc_1, PART: gl.constexpr, R: gl.constexpr):
    """fp32 [rows]: the sums over warps, groups and digits; where two matrices share the tile, those of the first come
    first."""
    if R.bands == 1:
        rows = acc_0.reshape([_NUM_WARPS, 8, 4, 2, 2]).permute((1, 3, 0, 2, 4))
    else:
        rows = gl.join(acc_0, acc_1).reshape([_NUM_WARPS, 2, 2, 2, 4, 2, 2, 2])
        if PART == 2:
            rows = rows.permute((2, 1, 3, 7, 5, 0, 4, 6))
        else:
            rows = rows.permute((1, 2, 3, 7, 5, 0, 4, 6))
    return gl.sum(rows.reshape([R.num_rows, _NUM_WARPS * 8]), axis=1)
