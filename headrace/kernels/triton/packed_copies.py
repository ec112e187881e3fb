"""A group of warps that copies tiles of packed weights into the ring, all of a launch, in the order in which the others
multiply them.

The others' instructions are what a tile takes besides its bytes; so none of them goes into copies. Each part of a
layer has its copies written out, so that a thread has one address for a tile and constants from there on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.triton.gluon_names import async_load
from headrace.kernels.triton.packed_ring_config import COPY_WARPS, GROUP
from headrace.kernels.triton.ring_slots import next_slot
from headrace.kernels.triton.stack_places import NUM_PLACES
from headrace.kernels.triton.weight_ring import NUM_WARPS, ROWS
from headrace.kernels.triton.word_matrix import CHUNK_WORDS

_NUM_PLACES, _NUM_WARPS, _GROUP = gl.constexpr(NUM_PLACES), gl.constexpr(NUM_WARPS), gl.constexpr(GROUP)
_CHUNK_WORDS, _COPY_THREADS, _UNIT = (
    gl.constexpr(CHUNK_WORDS),
    gl.constexpr(32 * COPY_WARPS),
    gl.constexpr(16),
)
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.constexpr_function
def _word_copies(R):
    """[rows of a piece, words]: 16 bytes a thread."""
    return gl.BlockedLayout([1, 4], [1, 32], [R.piece_rows, COPY_WARPS // R.piece_rows], [1, 0])


@gluon.constexpr_function
def _scale_copies(R):
    """[groups of a tile, rows]: 16 bytes a thread."""
    lanes = R.num_rows * R.scale_bytes // 16
    return gl.BlockedLayout([1, 16 // R.scale_bytes], [32 // lanes, lanes], [COPY_WARPS, 1], [1, 0])


@gluon.constexpr_function
def scale_type(R):
    """Of scales and minimums."""
    return gl.float16 if R.scale_bytes == 2 else gl.float32


@gluon.constexpr_function
def words_layout(R):
    """Rows of a tile lie a multiple of 128 bytes apart; with the chunks of every other ``lane_rows`` exchanged, those
    of two threads fill all banks."""
    return gl.SwizzledSharedLayout(CHUNK_WORDS, R.lane_rows, 2, [1, 0])


@gluon.jit
def make_packed_ring(R: gl.constexpr):
    """Words, scales and minimums of each slot, in shared memory; barriers: a slot is full, and it is empty."""
    words = gl.allocate_shared_memory(gl.int32, [R.num_slots, R.num_rows, R.block_k // 8], words_layout(R))
    kind: gl.constexpr = scale_type(R)
    scales = gl.allocate_shared_memory(kind, [R.num_slots, _NUM_WARPS, R.groups, R.num_rows], _SCALES)
    minimums = scales
    if R.has_minimums:
        minimums = gl.allocate_shared_memory(kind, [R.num_slots, _NUM_WARPS, R.groups, R.num_rows], _SCALES)
    full = gl.allocate_shared_memory(gl.int64, [R.num_slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [R.num_slots, 1], mbarrier.MBarrierLayout())
    NUM_SLOTS: gl.constexpr = R.num_slots
    for slot in gl.static_range(NUM_SLOTS):
        mbarrier.init(full.index(slot), count=_COPY_THREADS)
        mbarrier.init(empty.index(slot), count=1)
    return words, scales, minimums, full, empty


@gluon.jit
def num_tiles(PART: gl.constexpr, R: gl.constexpr):
    """Rows of tiles of this program, none perhaps."""
    return gl.cdiv(R.row_tiles(PART) - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def copy_tiles(ring, weights_ptr, places_ptr, C: gl.constexpr, R: gl.constexpr):
    """All tiles of this program; where a layer's matrices are is loaded a layer ahead."""
    # a slot that nobody has used yet is waited for with the parity of the round before
    slot, phase = 0, 1
    offsets = _offsets(places_ptr, 0)
    for layer in range(C.num_layers):
        following = _offsets(places_ptr, gl.minimum(layer + 1, C.num_layers - 1))
        for part in gl.static_range(4):
            matrix = gl.multiple_of(weights_ptr + offsets[part] * _UNIT, 64)
            slot, phase = _copy_part(ring, matrix, slot, phase, part, R)
        offsets = following


@gluon.jit
def _offsets(places_ptr, layer):
    """From the first matrix to each of a layer's, in units whose multiples Triton knows to be aligned."""
    row_ptr = places_ptr + layer * _NUM_PLACES
    first, second, third = gl.load(row_ptr), gl.load(row_ptr + 1), gl.load(row_ptr + 2)
    return first // _UNIT, second // _UNIT, third // _UNIT, gl.load(row_ptr + 3) // _UNIT


@gluon.jit
def _copy_part(ring, matrix, slot, phase, PART: gl.constexpr, R: gl.constexpr):
    words, scales, minimums, full, empty = ring
    WORDS: gl.constexpr = R.inputs[PART] // 8
    scales_ptr = _at(matrix, R.scales_after[PART], R)
    minimums_ptr = scales_ptr
    if R.has_minimums:
        minimums_ptr = _at(matrix, R.minimums_after[PART], R)
    for tile in range(num_tiles(PART, R)):
        first = (gl.program_id(0) + tile * gl.num_programs(0)) * R.lines(PART)
        for round in range(R.rounds(PART)):
            mbarrier.wait(empty.index(slot), phase)
            _copy_words(
                words, slot, matrix + (first.to(gl.int64) * WORDS + round * (R.block_k // 8)), PART, R
            )
            _copy_scales(scales, slot, scales_ptr + first, round, PART, R)
            if R.has_minimums:
                _copy_scales(minimums, slot, minimums_ptr + first, round, PART, R)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot, phase = next_slot(slot, phase, R.num_slots)
    return slot, phase


@gluon.jit
def _at(matrix, BYTES: gl.constexpr, R: gl.constexpr):
    """Scales so many bytes behind the words."""
    return (matrix + BYTES // 4).to(gl.pointer_type(scale_type(R)), bitcast=True)


@gluon.constexpr_function
def _line(row, part, R):
    """The line of the matrix that a tile's row is, behind the first: of two matrices each has eight rows in turn."""
    if part != 2:
        return row
    return row // 8 % 2 * R.outputs[part] + row // 16 * 8 + row % 8


@gluon.jit
def _copy_words(words, slot, tile_ptr, PART: gl.constexpr, R: gl.constexpr):
    """Piece by piece of so many rows as all threads copy at once."""
    LAYOUT: gl.constexpr = _word_copies(R)
    WORDS: gl.constexpr = R.inputs[PART] // 8
    PIECES: gl.constexpr = R.num_rows // R.piece_rows
    PIECE_ROWS: gl.constexpr = R.piece_rows
    LANE_ROWS: gl.constexpr = R.lane_rows
    targets = words._reinterpret(gl.int32, [R.num_slots * PIECES, PIECE_ROWS, R.block_k // 8], ROWS)
    row = gl.arange(0, PIECE_ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, R.block_k // 8, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    turned = row // LANE_ROWS % 2 * _CHUNK_WORDS
    # a turned word's neighbours are still its neighbours, which has to be said
    start_0 = row * WORDS + gl.max_contiguous(gl.multiple_of(word ^ turned, [1, 4]), [1, 4])
    start_1 = row * WORDS + gl.max_contiguous(gl.multiple_of(word ^ turned ^ _CHUNK_WORDS, [1, 4]), [1, 4])
    start_0, start_1 = tile_ptr + start_0, tile_ptr + start_1
    for piece in gl.static_range(PIECES):
        away = _line(piece * PIECE_ROWS, PART, R) * WORDS
        target = targets.index(slot * PIECES + piece)
        if piece * PIECE_ROWS // LANE_ROWS % 2 == 0:
            async_load(target, start_0 + away)
        else:
            async_load(target, start_1 + away)


@gluon.jit
def _copy_scales(target, slot, start, round, PART: gl.constexpr, R: gl.constexpr):
    """Of a tile's groups and rows."""
    LAYOUT: gl.constexpr = _scale_copies(R)
    STRIDE: gl.constexpr = R.strides[PART]
    GROUPS: gl.constexpr = R.groups * _NUM_WARPS
    part = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.arange(0, R.num_rows, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if R.group == 0:
        group = part * 0
    else:
        group = (round * R.block_k + part * _GROUP) // R.group
    if PART == 2:
        line = row // 16 * 8 + row % 8 + row // 8 % 2 * R.outputs[PART]
    else:
        line = row
    targets = target._reinterpret(scale_type(R), [R.num_slots, GROUPS, R.num_rows], ROWS)
    async_load(targets.index(slot), start + (group * STRIDE + line))
