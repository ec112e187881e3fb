"""Many rows of x times packed weights on Hopper: one group of warps copies, two others decode and multiply.

As ``packed_wgmma_kernel``, but each of the two has its own half of a program's outputs and meets the rest of the
program at the barriers of chunks only, so that one decodes while the other multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.triton.gluon_names import async_load, barrier
from headrace.kernels.triton.launch import let_next_start, wait_for_previous
from headrace.kernels.triton.packed_wgmma_kernel import (
    WORDS,
    ask_matrix,
    operand_layout,
    plane_weights,
    product_layout,
    x_copy_layout,
)
from headrace.kernels.triton.ring_slots import next_slot
from headrace.kernels.triton.weight_ring import FLAT, ROWS

GROUP_WARPS = gl.constexpr(4)
_MULTIPLYING_REGISTERS = gl.constexpr(208)
_COPYING_REGISTERS = gl.constexpr(88)
_COPIER_THREADS = gl.constexpr(128)
_STAGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [0, 1]))


@gluon.jit
def _place(num_rows, num_outputs, C: gl.constexpr):
    """First row of x, first output, split, first chunk and end of a program; those that share words are neighbours.

    With a grid of three axes the copying group's addresses are made so early that registers are spilled.
    """
    num_t = gl.cdiv(num_rows, C.block_t)
    num_n = gl.cdiv(num_outputs, C.block_n)
    program = gl.program_id(0)
    split = program // (num_t * num_n)
    first = split * (C.words_each // 16)
    end = gl.minimum(first + C.words_each // 16, C.num_words // 16)
    return program % num_t * C.block_t, program // num_t % num_n * C.block_n, split, first, end


@gluon.jit
def _ask_x(ring, slot, x_ptr, chunk, first_token, num_rows, x_stride, C: gl.constexpr):
    """[T, columns] of a chunk, zeros beyond the columns; beyond the rows the last again, which are not stored."""
    LAYOUT: gl.constexpr = x_copy_layout(C, gl.num_warps())
    token = gl.arange(0, C.block_t, layout=gl.SliceLayout(1, LAYOUT))
    token = gl.minimum(token, num_rows - 1 - first_token)
    column = gl.arange(0, C.chunk, layout=gl.SliceLayout(0, LAYOUT))
    away = token[:, None] * x_stride + column[None, :]  # 32 bits: a thread has many of them
    start = x_ptr + (first_token.to(gl.int64) * x_stride + chunk * C.chunk)
    if C.num_inputs % C.chunk == 0:
        async_load(ring.index(slot), start + away)
    else:
        inside = (chunk * C.chunk + column < C.num_inputs)[None, :]
        async_load(ring.index(slot), start + away, mask=gl.broadcast(inside, away)[0])


@gluon.jit
def _copy_chunks(
    source, rings, x_ring, barriers, NUM_STAGES: gl.constexpr, C: gl.constexpr, PDL: gl.constexpr
):
    """Words and scales of the first chunks before the previous kernel has ended, then x; then all others."""
    x_ptr, codes_ptr, scales_ptr, minimums_ptr, num_rows, num_outputs, stride, x_stride = source
    full, empty, _ = barriers
    token, row, _, first, end = _place(num_rows, num_outputs, C)
    for ahead in gl.static_range(NUM_STAGES):
        if first + ahead < end:
            ask_matrix(
                rings, ahead, codes_ptr, scales_ptr, minimums_ptr, first + ahead, row, num_outputs, stride, C
            )
    wait_for_previous(PDL)
    # a slot that nobody has used yet is waited for with the parity of the phase before
    slot, phase = 0, 1
    for chunk in range(first, end):
        mbarrier.wait(empty.index(slot), phase)
        if chunk >= first + NUM_STAGES:
            ask_matrix(rings, slot, codes_ptr, scales_ptr, minimums_ptr, chunk, row, num_outputs, stride, C)
        _ask_x(x_ring, slot, x_ptr, chunk, token, num_rows, x_stride, C)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        slot, phase = next_slot(slot, phase, NUM_STAGES)


@gluon.jit
def _multiply(
    task,
    WHICH: gl.constexpr,
    NUMBER: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    C: gl.constexpr,
):
    """One half of a program's outputs."""
    to, matrix, x_ring, barriers = task
    words_ring, scales, minimums = matrix
    full, empty, done = barriers
    dtype: gl.constexpr = gl.bfloat16 if NUMBER == "bf16" else gl.float16
    OPERAND: gl.constexpr = operand_layout(C, gl.num_warps())
    PLANES: gl.constexpr = C.num_planes
    HALF: gl.constexpr = C.block_n // 2
    token, row, split, first, end = _place(to[2], to[3], C)
    acc = gl.full([HALF, C.block_t], 0.0, gl.float32, product_layout(C, gl.num_warps()))
    slot, phase = 0, 0
    for _ in range(first, end):
        mbarrier.wait(full.index(slot), phase)
        hopper.fence_async_shared()
        words = words_ring.index(slot * 2 + WHICH).load(OPERAND)
        x = x_ring.index(slot)
        for plane in gl.static_range(PLANES):
            if plane % C.span_planes == 0:
                scale = _half_scales(scales, slot, plane // C.span_planes, WHICH, dtype, OPERAND, C)
                minimum = scale
                if C.has_minimums:
                    minimum = _half_scales(minimums, slot, plane // C.span_planes, WHICH, dtype, OPERAND, C)
            weights = plane_weights(words, scale, minimum, plane, NUMBER, C)
            columns = x.slice(16 * plane, 16, dim=1).permute((1, 0))
            acc = hopper.warpgroup_mma(weights, columns, acc, is_async=True)
            if HALF > 64:  # a plane's weights take so many registers that only one may be under way
                acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        # products under way at the end of a round would be made synchronous by the assembler
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, NUM_STAGES)
    _store(acc, x_ring, done, to, token, row + WHICH * HALF, split, WHICH, C)


@gluon.jit
def _half_scales(
    scales,
    slot,
    SPAN: gl.constexpr,
    WHICH: gl.constexpr,
    dtype: gl.constexpr,
    OPERAND: gl.constexpr,
    C: gl.constexpr,
):
    """[n / 2, 1] of the type of weights: a span's scales."""
    found = scales.index((slot * C.num_spans + SPAN) * 2 + WHICH).load(gl.SliceLayout(1, OPERAND))
    return found.to(dtype)[:, None]


@gluon.constexpr_function
def staged_halves(C, out_bits, num_stages):
    """How many halves of a program's outputs the memory of x is; 0: it is no whole number, or not two, and so outputs
    are stored from where they were summed. Splits' sums are anyhow: their runs of eight are whole sectors of fp32."""
    if C.num_splits > 1:
        return 0
    halves, rest = divmod(num_stages * C.chunk * 16, C.block_n // 2 * out_bits)
    return 0 if rest or halves < 2 else halves


@gluon.constexpr_function
def _out_layout(product, is_staged, num_warps):
    """Eight neighbouring outputs a thread, or what the matrix units leave."""
    return gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1]) if is_staged else product


@gluon.jit
def _store(acc, x_ring, done, to, first_token, first_row, split, WHICH: gl.constexpr, C: gl.constexpr):
    """acc [n / 2, T] to out [T, col + n], or to fp32 sums [splits, T, n]."""
    bias_ptr, out_ptr, num_rows, num_outputs, col, out_stride = to
    HALF: gl.constexpr = C.block_n // 2
    kind: gl.constexpr = out_ptr.dtype.element_ty
    if C.has_bias and C.num_splits == 1:
        place = first_row + gl.arange(0, HALF, layout=gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + place, mask=place < num_outputs, other=0.0).to(gl.float32)[:, None]
    STAGED: gl.constexpr = staged_halves(C, kind.primitive_bitwidth, x_ring.shape[0])
    LINES: gl.constexpr = _out_layout(acc.type.layout, STAGED > 0, gl.num_warps())
    if STAGED > 0:
        # x has been read by both, so its memory is free
        mbarrier.arrive(done, count=1)
        mbarrier.wait(done, 0)
        staged = x_ring._reinterpret(kind, [STAGED, HALF, C.block_t], _STAGED).index(WHICH)
        staged.store(acc.to(kind))
        barrier()
        numbers = staged.load(LINES)
    else:
        numbers = acc.to(kind)
    row = first_row + gl.arange(0, HALF, layout=gl.SliceLayout(1, LINES))
    token = first_token + gl.arange(0, C.block_t, layout=gl.SliceLayout(0, LINES))
    inside = (row < num_outputs)[:, None] & (token < num_rows)[None, :]
    if C.num_splits > 1:
        line = (split * num_rows + token).to(gl.int64)
        gl.store(out_ptr + (line[None, :] * num_outputs + row[:, None]), numbers, mask=inside)
    else:
        away = token.to(gl.int64)[None, :] * out_stride + (col + row)[:, None]
        gl.store(out_ptr + away, numbers, mask=inside)


@gluon.jit(do_not_specialize=["num_rows"])
def packed_pair_kernel(
    x_ptr, codes_ptr, scales_ptr, minimums_ptr, bias_ptr, out_ptr,
    num_rows, num_outputs, stride, col, x_stride, out_stride,
    NUMBER: gl.constexpr, NUM_STAGES: gl.constexpr, C: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``packed_wgmma_kernel``; 4 warps a group."""
    let_next_start(PDL)
    dtype: gl.constexpr = gl.bfloat16 if NUMBER == "bf16" else gl.float16
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    kind: gl.constexpr = scales_ptr.dtype.element_ty
    HALF: gl.constexpr = C.block_n // 2
    words_ring = gl.allocate_shared_memory(gl.int32, [NUM_STAGES, C.block_n, 16], WORDS)
    scales_ring = gl.allocate_shared_memory(kind, [NUM_STAGES, C.num_spans, C.block_n], ROWS)
    minimums_ring = scales_ring
    if C.has_minimums:
        minimums_ring = gl.allocate_shared_memory(kind, [NUM_STAGES, C.num_spans, C.block_n], ROWS)
    x_ring = gl.allocate_shared_memory(dtype, [NUM_STAGES, C.block_t, C.chunk], X)
    halves = words_ring._reinterpret(gl.int32, [NUM_STAGES * 2, HALF, 16], WORDS)
    scales = scales_ring._reinterpret(kind, [NUM_STAGES * C.num_spans * 2, HALF], FLAT)
    minimums = minimums_ring._reinterpret(kind, [NUM_STAGES * C.num_spans * 2, HALF], FLAT)
    rings = (words_ring, scales_ring, minimums_ring)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(index), count=_COPIER_THREADS)
        mbarrier.init(empty.index(index), count=2)
    mbarrier.init(done, count=2)
    hopper.fence_async_shared()
    source = (x_ptr, codes_ptr, scales_ptr, minimums_ptr, num_rows, num_outputs, stride, x_stride)
    to = (bias_ptr, out_ptr, num_rows, num_outputs, col, out_stride)
    barriers = (full, empty, done)
    matrix = (halves, scales, minimums)
    task = (to, matrix, x_ring, barriers)
    gl.warp_specialize(
        [
            (_multiply, (task, gl.constexpr(0), NUMBER, NUM_STAGES, C)),
            (_multiply, (task, gl.constexpr(1), NUMBER, NUM_STAGES, C)),
            (_copy_chunks, (source, rings, x_ring, barriers, NUM_STAGES, C, PDL)),
        ],
        [GROUP_WARPS, GROUP_WARPS],
        [_MULTIPLYING_REGISTERS, _COPYING_REGISTERS],
    )
