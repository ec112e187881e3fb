"""A few rows of x times packed weights with Hopper's asynchronous matrix units, whose weights lie in registers.

out^T [n, T] = W [n, K] x^T [K, T]. Chunks of words, their scales and x come to shared memory by asynchronous copies, a
few of them ahead. A thread loads from there the words whose codes are its own part of the matrix units' operand, one
plane after the other, so weights are decoded once, where they are multiplied; x is multiplied where it lies.

Legend: T rows of x, n outputs of a program, P planes of a chunk, S spans; see ``linear_packed_kernels``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from headrace.kernels.triton.gluon_names import async_load
from headrace.kernels.triton.launch import let_next_start, wait_for_previous
from headrace.kernels.triton.weight_ring import FLAT, ROWS

WORDS = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 2, [1, 0]))
"""Eight rows' words 0 to 7, and 8 to 15, are in different banks."""


@gluon.constexpr_function
def operand_layout(C, num_warps):
    """Where the matrix units want weights [n, 16], and so words."""
    return gl.DotOperandLayout(0, product_layout(C, num_warps), 2)


@gluon.constexpr_function
def product_layout(C, num_warps):
    """Of sums [n, T]."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C.block_t, 16])


@gluon.constexpr_function
def _word_copy(num_warps):
    """Four words a thread."""
    return gl.BlockedLayout([1, 4], [8, 4], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def x_copy_layout(C, num_warps):
    """Eight numbers a thread, whole rows of a chunk a warp."""
    across = C.chunk // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _scale_copy(C, dtype, num_warps):
    """16 bytes a thread."""
    each = 128 // dtype.primitive_bitwidth
    across = min(32, C.block_n // each)
    return gl.BlockedLayout([1, each], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.jit
def _ask_words(ring, slot, codes_ptr, chunk, first_row, num_outputs, C: gl.constexpr):
    """The words of a chunk; of the last output again beyond the outputs."""
    LAYOUT: gl.constexpr = _word_copy(gl.num_warps())
    row = first_row + gl.arange(0, C.block_n, layout=gl.SliceLayout(1, LAYOUT))
    row = gl.minimum(row, num_outputs - 1).to(gl.int64)
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    start = codes_ptr + chunk * 16
    async_load(
        ring.index(slot), start + (row[:, None] * C.num_words + word[None, :]), eviction_policy="evict_first"
    )


@gluon.jit
def _ask_scales(ring, slot, scales_ptr, chunk, first_row, stride, C: gl.constexpr):
    """[S, n]; of the last group again beyond the columns, where x is zero."""
    LAYOUT: gl.constexpr = _scale_copy(C, ring.dtype, gl.num_warps())
    span = gl.arange(0, C.num_spans, layout=gl.SliceLayout(1, LAYOUT))
    row = first_row + gl.arange(0, C.block_n, layout=gl.SliceLayout(0, LAYOUT))
    group = (chunk * C.chunk + span * (C.span_planes * 16)) // C.group
    group = gl.minimum(group, C.num_groups - 1).to(gl.int64)
    away = group[:, None] * stride + row[None, :]
    if C.block_n > 128:  # ``word_matrix.ROW_MULTIPLE``
        async_load(ring.index(slot), scales_ptr + away, mask=gl.broadcast((row < stride)[None, :], away)[0])
    else:
        async_load(ring.index(slot), scales_ptr + away)


@gluon.jit
def ask_matrix(
    rings, slot, codes_ptr, scales_ptr, minimums_ptr, chunk, first_row, num_outputs, stride, C: gl.constexpr
):
    """A chunk's words, scales and minimums into a slot of ``rings`` (words, scales, minimums)."""
    _ask_words(rings[0], slot, codes_ptr, chunk, first_row, num_outputs, C)
    _ask_scales(rings[1], slot, scales_ptr, chunk, first_row, stride, C)
    if C.has_minimums:
        _ask_scales(rings[2], slot, minimums_ptr, chunk, first_row, stride, C)


@gluon.jit
def _ask_x(ring, slot, x_ptr, chunk, num_rows, x_stride, C: gl.constexpr):
    """[T, columns] of a chunk, zeros beyond rows and columns."""
    LAYOUT: gl.constexpr = x_copy_layout(C, gl.num_warps())
    token = gl.arange(0, C.block_t, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, C.chunk, layout=gl.SliceLayout(0, LAYOUT))
    away = token.to(gl.int64)[:, None] * x_stride + column[None, :]
    inside = gl.broadcast((token < num_rows)[:, None], away)[0]
    if C.num_inputs % C.chunk != 0:
        inside = inside & (chunk * C.chunk + column < C.num_inputs)[None, :]
    async_load(ring.index(slot), x_ptr + chunk * C.chunk + away, mask=inside)


@gluon.jit
def _scales(scales, slot, SPAN: gl.constexpr, dtype: gl.constexpr, OPERAND: gl.constexpr, C: gl.constexpr):
    """[n, 1] of the type of weights: a span's scales."""
    found = scales.index(slot * C.num_spans + SPAN).load(gl.SliceLayout(1, OPERAND))
    return found.to(dtype)[:, None]


@gluon.jit
def plane_weights(words, scale, minimum, PLANE: gl.constexpr, NUMBER: gl.constexpr, C: gl.constexpr):
    """[n, 16]: a plane's weights."""
    return gl.inline_asm_elementwise(
        C.pair_ptx(PLANE, NUMBER),
        "=r,r,r,r,r",
        [words, scale, minimum],
        dtype=scale.dtype,
        is_pure=True,
        pack=2,
    )


@gluon.jit(do_not_specialize=["num_rows", "num_outputs", "col"])
def packed_wgmma_kernel(
    x_ptr, codes_ptr, scales_ptr, minimums_ptr, bias_ptr, out_ptr,
    num_rows, num_outputs, stride, col, x_stride, out_stride,
    NUMBER: gl.constexpr, NUM_STAGES: gl.constexpr, C: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``packed_tile_kernel``. x: 16-bit, at most T rows of a multiple of 16 numbers.

    NUM_STAGES: chunks in shared memory.
    """
    let_next_start(PDL)
    dtype: gl.constexpr = gl.bfloat16 if NUMBER == "bf16" else gl.float16
    OPERAND: gl.constexpr = operand_layout(C, gl.num_warps())
    PRODUCT: gl.constexpr = product_layout(C, gl.num_warps())
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    kind: gl.constexpr = scales_ptr.dtype.element_ty
    words_ring = gl.allocate_shared_memory(gl.int32, [NUM_STAGES, C.block_n, 16], WORDS)
    scales_ring = gl.allocate_shared_memory(kind, [NUM_STAGES, C.num_spans, C.block_n], ROWS)
    minimums_ring = scales_ring
    if C.has_minimums:
        minimums_ring = gl.allocate_shared_memory(kind, [NUM_STAGES, C.num_spans, C.block_n], ROWS)
    x_ring = gl.allocate_shared_memory(dtype, [NUM_STAGES, C.block_t, C.chunk], X)
    scales = scales_ring._reinterpret(kind, [NUM_STAGES * C.num_spans, C.block_n], FLAT)
    minimums = minimums_ring._reinterpret(kind, [NUM_STAGES * C.num_spans, C.block_n], FLAT)
    rings = (words_ring, scales_ring, minimums_ring)

    PLANES: gl.constexpr = C.num_planes
    row = gl.program_id(1) * C.block_n
    first = gl.program_id(2) * (C.words_each // 16)
    end = gl.minimum(first + C.words_each // 16, C.num_words // 16)
    for ahead in gl.static_range(NUM_STAGES - 1):
        if first + ahead < end:
            ask_matrix(
                rings, ahead, codes_ptr, scales_ptr, minimums_ptr, first + ahead, row, num_outputs, stride, C
            )
    wait_for_previous(PDL)
    for ahead in gl.static_range(NUM_STAGES - 1):
        if first + ahead < end:
            _ask_x(x_ring, ahead, x_ptr, first + ahead, num_rows, x_stride, C)
        async_copy.commit_group()
    acc = gl.full([C.block_n, C.block_t], 0.0, gl.float32, PRODUCT)
    slot, free = 0, NUM_STAGES - 1
    for chunk in range(first, end):
        async_copy.wait_group(NUM_STAGES - 2)  # and for all threads, which are done with the chunk before
        hopper.fence_async_shared()
        following = chunk + NUM_STAGES - 1
        if following < end:
            ask_matrix(
                rings, free, codes_ptr, scales_ptr, minimums_ptr, following, row, num_outputs, stride, C
            )
            _ask_x(x_ring, free, x_ptr, following, num_rows, x_stride, C)
        async_copy.commit_group()
        words = words_ring.index(slot).load(OPERAND)
        x = x_ring.index(slot)
        scale = _scales(scales, slot, 0, dtype, OPERAND, C)
        minimum = scale
        if C.has_minimums:
            minimum = _scales(minimums, slot, 0, dtype, OPERAND, C)
        for plane in gl.static_range(PLANES):
            if plane > 0 and plane % C.span_planes == 0:
                scale = _scales(scales, slot, plane // C.span_planes, dtype, OPERAND, C)
                minimum = scale
                if C.has_minimums:
                    minimum = _scales(minimums, slot, plane // C.span_planes, dtype, OPERAND, C)
            weights = plane_weights(words, scale, minimum, plane, NUMBER, C)
            columns = x.slice(16 * plane, 16, dim=1).permute((1, 0))
            acc = hopper.warpgroup_mma(weights, columns, acc, is_async=True)
        # products under way at the end of a round would be made synchronous by the assembler
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        free = slot
        slot = gl.where(slot == NUM_STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    _store(acc, bias_ptr, out_ptr, num_rows, num_outputs, col, out_stride, C)


@gluon.constexpr_function
def _store_layout(C, num_warps):
    """Neighbouring outputs side by side."""
    return gl.BlockedLayout([4, 1], [16, 2], [1, num_warps], [0, 1])


@gluon.jit
def _store(acc, bias_ptr, out_ptr, num_rows, num_outputs, col, out_stride, C: gl.constexpr):
    """acc [n, T] to out [T, col + n], or to fp32 sums [splits, T, n]."""
    LAYOUT: gl.constexpr = _store_layout(C, gl.num_warps())
    token = gl.arange(0, C.block_t, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.program_id(1) * C.block_n + gl.arange(0, C.block_n, layout=gl.SliceLayout(1, LAYOUT))
    inside = (row < num_outputs)[:, None] & (token < num_rows)[None, :]
    if C.num_splits > 1:
        acc = gl.convert_layout(acc, LAYOUT)
        line = gl.program_id(2) * num_rows + token
        gl.store(out_ptr + (line.to(gl.int64)[None, :] * num_outputs + row[:, None]), acc, mask=inside)
    else:
        if C.has_bias:
            lines: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
            place = gl.program_id(1) * C.block_n + gl.arange(0, C.block_n, layout=lines)
            acc += gl.load(bias_ptr + place, mask=place < num_outputs, other=0.0).to(gl.float32)[:, None]
        numbers = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LAYOUT)
        away = token.to(gl.int64)[None, :] * out_stride + (col + row)[:, None]
        gl.store(out_ptr + away, numbers, mask=inside)
