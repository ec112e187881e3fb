"""Kernels of ``linear_packed``: one row of x, several rows, and decoding.

Legend: T rows of x, n outputs, K inputs; W words of a round. A plane is what stands at one place of the words: 16
columns of each chunk of 16 words; a span is the planes of a chunk that share a scale (``PackedConfig``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.launch import IS_INTERPRETED, let_next_start, prefetch_rows, wait_for_previous


@triton.jit
def _load_words(start, first, in_rows, C: tl.constexpr):
    """[rows, W] from word ``first`` on; they are read once, so they need not stay in the caches."""
    word = first + tl.arange(0, C.block_w)
    inside = in_rows[:, None]
    if not C.has_whole_rounds:
        inside = inside & (word < C.num_words)[None, :]
    return tl.load(start + word[None, :], mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _load_scales(pointer, row, first, stride, SPAN: tl.constexpr, C: tl.constexpr):
    """[rows, W / 4] of the words' chunks, as they are stored; zeros beyond the columns."""
    quad = tl.arange(0, C.block_w // 4)
    chunk = first // 16 + quad // 4
    group = (chunk * C.chunk + SPAN * C.span_planes * 16) // C.group
    place = group.to(tl.int64)[None, :] * stride + row[:, None]
    if C.has_whole_rounds:
        return tl.load(pointer + place)
    else:
        return tl.load(pointer + place, mask=(group < C.num_groups)[None, :], other=0.0)


@triton.jit
def _load_plane(x_ptr, first, PLANE: tl.constexpr, C: tl.constexpr):
    """[W] fp32 of the one row of x: the columns of a plane."""
    word = first + tl.arange(0, C.block_w)
    column = word // 16 * C.chunk + PLANE * 16 + word % 16
    if C.has_whole_rounds:
        return tl.load(x_ptr + column).to(tl.float32)
    else:
        return tl.load(x_ptr + column, mask=column < C.num_inputs, other=0.0).to(tl.float32)


@triton.jit
def _quarters(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """[ROWS, COUNT] or, with no rows, [COUNT] -> the four of each four neighbours, which are one thread's own."""
    if ROWS == 0:
        even, odd = tl.split(tl.reshape(x, [COUNT // 4, 2, 2]))
    else:
        even, odd = tl.split(tl.reshape(x, [ROWS, COUNT // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _field(words, PLANE: tl.constexpr, C: tl.constexpr):
    """A plane's codes plus ``C.field_excess`` as fp32."""
    SHIFT: tl.constexpr = C.shift_left(PLANE)
    MASK: tl.constexpr = C.field_mask(PLANE)
    EXPONENT: tl.constexpr = C.field_exponent(PLANE)
    if SHIFT > 0:
        words = words << SHIFT
    elif SHIFT < 0:
        words = words >> -SHIFT
    if IS_INTERPRETED:
        return ((words & MASK) | EXPONENT).to(tl.float32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            C.field_ptx(PLANE), "=f,r", [words], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _row_span(acc, words, scales, minimums, x_ptr, first, SPAN: tl.constexpr, C: tl.constexpr):
    """acc [rows, W / 4] plus the products of one span of a round."""
    w0, w1, w2, w3 = _quarters(words, C.block_n, C.block_w)
    sums = tl.full([C.block_n, C.block_w // 4], 0.0, tl.float32)
    excess = tl.full([C.block_w // 4], 0.0, tl.float32)
    x_sums = excess
    for plane in tl.static_range(SPAN * C.span_planes, (SPAN + 1) * C.span_planes):
        x0, x1, x2, x3 = _quarters(_load_plane(x_ptr, first, plane, C), 0, C.block_w)
        x_sum = (x0 + x1) + (x2 + x3)
        excess += C.field_excess(plane) * x_sum
        x_sums += x_sum
        sums += _field(w0, plane, C) * x0[None, :]
        sums += _field(w1, plane, C) * x1[None, :]
        sums += _field(w2, plane, C) * x2[None, :]
        sums += _field(w3, plane, C) * x3[None, :]
    acc += (sums - excess[None, :]) * scales.to(tl.float32)
    if C.has_minimums:
        acc += minimums.to(tl.float32) * x_sums[None, :]
    return acc


@triton.jit
def _load_spans(pointer, row, first, stride, C: tl.constexpr):
    """The scales of a round's spans, four at most."""
    s0 = _load_scales(pointer, row, first, stride, 0, C)
    s1, s2, s3 = s0, s0, s0
    if C.num_spans > 1:
        s1 = _load_scales(pointer, row, first, stride, 1, C)
    if C.num_spans > 2:
        s2 = _load_scales(pointer, row, first, stride, 2, C)
        s3 = _load_scales(pointer, row, first, stride, 3, C)
    return s0, s1, s2, s3


@triton.jit
def _load_round(start, scales_ptr, minimums_ptr, row, in_rows, first, stride, C: tl.constexpr):
    """What a round needs of the matrix: words, scales, minimums."""
    words = _load_words(start, first, in_rows, C)
    s0, s1, s2, s3 = _load_spans(scales_ptr, row, first, stride, C)
    m0, m1, m2, m3 = s0, s1, s2, s3
    if C.has_minimums:
        m0, m1, m2, m3 = _load_spans(minimums_ptr, row, first, stride, C)
    return words, s0, s1, s2, s3, m0, m1, m2, m3


@triton.jit
def _row_part(acc, words, s0, s1, s2, s3, m0, m1, m2, m3, x_ptr, first, C: tl.constexpr):
    """acc plus the products of one round."""
    if C.bits == 8:
        words = words ^ C.flip
    acc = _row_span(acc, words, s0, m0, x_ptr, first, 0, C)
    if C.num_spans > 1:
        acc = _row_span(acc, words, s1, m1, x_ptr, first, 1, C)
    if C.num_spans > 2:
        acc = _row_span(acc, words, s2, m2, x_ptr, first, 2, C)
        acc = _row_span(acc, words, s3, m3, x_ptr, first, 3, C)
    return acc


@triton.jit(do_not_specialize=["num_outputs", "col"])
def packed_row_kernel(
    x_ptr, codes_ptr, scales_ptr, minimums_ptr, bias_ptr, out_ptr, num_outputs, stride, col,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of x. The next words are on their way to registers while codes of the last are multiplied; the first are
    asked for before the previous kernel has ended. stride: of the scales of a group."""
    let_next_start(PDL)
    row = tl.program_id(0) * C.block_n + tl.arange(0, C.block_n)
    in_rows = row < num_outputs
    start = codes_ptr + row.to(tl.int64)[:, None] * C.num_words
    words, s0, s1, s2, s3, m0, m1, m2, m3 = _load_round(
        start, scales_ptr, minimums_ptr, row, in_rows, 0, stride, C
    )
    wait_for_previous(PDL)
    acc = tl.full([C.block_n, C.block_w // 4], 0.0, tl.float32)
    for first in range(C.block_w, C.num_words, C.block_w):
        following, t0, t1, t2, t3, n0, n1, n2, n3 = _load_round(
            start, scales_ptr, minimums_ptr, row, in_rows, first, stride, C
        )
        acc = _row_part(acc, words, s0, s1, s2, s3, m0, m1, m2, m3, x_ptr, first - C.block_w, C)
        words, s0, s1, s2, s3, m0, m1, m2, m3 = following, t0, t1, t2, t3, n0, n1, n2, n3
    acc = _row_part(acc, words, s0, s1, s2, s3, m0, m1, m2, m3, x_ptr, C.last_word, C)
    total = tl.sum(acc, axis=1)
    if C.has_bias:
        total += tl.load(bias_ptr + row, mask=in_rows, other=0.0)
    tl.store(out_ptr + col + row, total.to(out_ptr.dtype.element_ty), mask=in_rows)


@triton.jit
def _pairs(words, scales, minimums, PLANE: tl.constexpr, NUMBER: tl.constexpr, C: tl.constexpr):
    """words [n, 16], scales, minimums [n] -> a plane's weights [n, 16] of the type NUMBER names."""
    dtype: tl.constexpr = tl.bfloat16 if NUMBER == "bf16" else tl.float16 if NUMBER == "fp16" else tl.float32
    if IS_INTERPRETED or NUMBER == "fp32":
        if C.bits == 4:
            codes = ((words >> (4 * PLANE)) & 15).to(tl.float32) - C.zero
        else:
            codes = ((words << (24 - 8 * PLANE)) >> 24).to(tl.float32)
        weights = codes * scales.to(tl.float32)[:, None]
        if C.has_minimums:
            weights += minimums.to(tl.float32)[:, None]
        return weights.to(dtype)
    elif NUMBER == "bf16":
        scale = tl.broadcast_to(scales.to(tl.bfloat16)[:, None], words.shape)
        minimum = tl.broadcast_to(minimums.to(tl.bfloat16)[:, None], words.shape) if C.has_minimums else scale
        return tl.inline_asm_elementwise(
            C.pair_ptx(PLANE, "bf16"),
            "=r,r,r,r,r",
            [words, scale, minimum],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        scale = tl.broadcast_to(scales.to(tl.float16)[:, None], words.shape)
        minimum = tl.broadcast_to(minimums.to(tl.float16)[:, None], words.shape) if C.has_minimums else scale
        return tl.inline_asm_elementwise(
            C.pair_ptx(PLANE, "fp16"),
            "=r,r,r,r,r",
            [words, scale, minimum],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _plane(words, s0, s1, s2, s3, m0, m1, m2, m3, PLANE: tl.constexpr, NUMBER: tl.constexpr, C: tl.constexpr):
    SPAN: tl.constexpr = PLANE // C.span_planes
    if SPAN == 0:
        return _pairs(words, s0, m0, PLANE, NUMBER, C)
    elif SPAN == 1:
        return _pairs(words, s1, m1, PLANE, NUMBER, C)
    elif SPAN == 2:
        return _pairs(words, s2, m2, PLANE, NUMBER, C)
    else:
        return _pairs(words, s3, m3, PLANE, NUMBER, C)


@triton.jit
def _chunk_scale(pointer, row, chunk, stride, SPAN: tl.constexpr, C: tl.constexpr):
    """[rows] as stored: the scales of a chunk's span; of the last group beyond the columns, where x is zero."""
    group = tl.minimum((chunk * C.chunk + SPAN * C.span_planes * 16) // C.group, C.num_groups - 1)
    return tl.load(pointer + group.to(tl.int64) * stride + row)


@triton.jit
def _chunk_scales(pointer, row, chunk, stride, C: tl.constexpr):
    s0 = _chunk_scale(pointer, row, chunk, stride, 0, C)
    s1, s2, s3 = s0, s0, s0
    if C.num_spans > 1:
        s1 = _chunk_scale(pointer, row, chunk, stride, 1, C)
    if C.num_spans > 2:
        s2 = _chunk_scale(pointer, row, chunk, stride, 2, C)
        s3 = _chunk_scale(pointer, row, chunk, stride, 3, C)
    return s0, s1, s2, s3


@triton.jit
def _round_scales(scales_ptr, minimums_ptr, row, word, stride, C: tl.constexpr):
    """Scales and minimums of the chunk that begins at ``word``."""
    s0, s1, s2, s3 = _chunk_scales(scales_ptr, row, word // 16, stride, C)
    m0, m1, m2, m3 = s0, s1, s2, s3
    if C.has_minimums:
        m0, m1, m2, m3 = _chunk_scales(minimums_ptr, row, word // 16, stride, C)
    return s0, s1, s2, s3, m0, m1, m2, m3


@triton.jit
def _chunk_weights(words, s0, s1, s2, s3, m0, m1, m2, m3, NUMBER: tl.constexpr, C: tl.constexpr):
    """words [n, 16] of a chunk -> its weights [n, columns]; a thread's words become its own weights."""
    w0 = _plane(words, s0, s1, s2, s3, m0, m1, m2, m3, 0, NUMBER, C)
    w1 = _plane(words, s0, s1, s2, s3, m0, m1, m2, m3, 1, NUMBER, C)
    w2 = _plane(words, s0, s1, s2, s3, m0, m1, m2, m3, 2, NUMBER, C)
    w3 = _plane(words, s0, s1, s2, s3, m0, m1, m2, m3, 3, NUMBER, C)
    if C.bits == 8:
        planes = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [n, 16, 2 (plane / 2), 2 (plane % 2)]
        return tl.reshape(tl.permute(planes, [0, 2, 3, 1]), [C.block_n, C.chunk])
    else:
        w4 = _plane(words, s0, s1, s2, s3, m0, m1, m2, m3, 4, NUMBER, C)
        w5 = _plane(words, s0, s1, s2, s3, m0, m1, m2, m3, 5, NUMBER, C)
        w6 = _plane(words, s0, s1, s2, s3, m0, m1, m2, m3, 6, NUMBER, C)
        w7 = _plane(words, s0, s1, s2, s3, m0, m1, m2, m3, 7, NUMBER, C)
        even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
        odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
        return tl.reshape(tl.permute(tl.join(even, odd), [0, 2, 3, 4, 1]), [C.block_n, C.chunk])


@triton.jit
def _prefetch_scales(pointer, first_word, stride, C: tl.constexpr):
    """A program's scales into the L2: the loop asks for them when it needs them."""
    group = (first_word // 16 * C.chunk) // C.group + tl.arange(0, C.block_groups)
    place = tl.minimum(group, C.num_groups - 1).to(tl.int64) * stride + tl.program_id(0) * C.block_n
    prefetch_rows(pointer + place, C.block_n * (pointer.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "col"])
def packed_tile_kernel(
    x_ptr, codes_ptr, scales_ptr, minimums_ptr, bias_ptr, out_ptr,
    num_rows, num_outputs, stride, col, x_stride, out_stride,
    NUMBER: tl.constexpr, NUM_STAGES: tl.constexpr, PREFETCH_BYTES: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Several rows of x: decoded in registers, weights are the tall operand of the matrix units, x the narrow one.

    With several splits each program has a part of the inputs, and ``out`` takes their fp32 sums [splits, T, n].
    """
    let_next_start(PDL)
    row = tl.program_id(0) * C.block_n + tl.arange(0, C.block_n)
    token = tl.program_id(1) * C.block_t + tl.arange(0, C.block_t)
    in_rows, in_tokens = row < num_outputs, token < num_rows
    split = tl.program_id(2)
    start = codes_ptr + row.to(tl.int64)[:, None] * C.num_words
    x_start = x_ptr + token.to(tl.int64)[:, None] * x_stride
    first_word = split * C.words_each
    if PREFETCH_BYTES > 0:
        ahead = codes_ptr + tl.minimum(row, num_outputs - 1).to(tl.int64) * C.num_words + first_word
        prefetch_rows(ahead, PREFETCH_BYTES)
        _prefetch_scales(scales_ptr, first_word, stride, C)
        if C.has_minimums:
            _prefetch_scales(minimums_ptr, first_word, stride, C)
    wait_for_previous(PDL)
    acc = tl.full([C.block_n, C.block_t], 0.0, tl.float32)
    end = tl.minimum(first_word + C.words_each, C.num_words)
    for word in tl.range(first_word, end, 16, num_stages=NUM_STAGES):
        words = tl.load(
            start + (word + tl.arange(0, 16))[None, :], mask=in_rows[:, None], other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        column = word // 16 * C.chunk + tl.arange(0, C.chunk)
        inside = in_tokens[:, None]
        if C.num_inputs % C.chunk != 0:
            inside = inside & (column < C.num_inputs)[None, :]
        x = tl.load(x_start + column[None, :], mask=inside, other=0.0)
        s0, s1, s2, s3, m0, m1, m2, m3 = _round_scales(scales_ptr, minimums_ptr, row, word, stride, C)
        weights = _chunk_weights(words, s0, s1, s2, s3, m0, m1, m2, m3, NUMBER, C)
        acc = tl.dot(weights, tl.trans(x), acc, input_precision="ieee")
    inside = in_rows[:, None] & in_tokens[None, :]
    if C.num_splits > 1:
        line = (split * num_rows + token).to(tl.int64)
        tl.store(out_ptr + line[None, :] * num_outputs + row[:, None], acc, mask=inside)
    else:
        if C.has_bias:
            acc += tl.load(bias_ptr + row, mask=in_rows, other=0.0)[:, None]
        target = out_ptr + token.to(tl.int64)[None, :] * out_stride + col + row[:, None]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "col"])
def packed_sums_kernel(
    sums_ptr, bias_ptr, out_ptr, num_rows, num_outputs, col, out_stride,
    BLOCK: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The splits' sums added up, always in the same order."""
    let_next_start(PDL)
    token = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_outputs
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    SPLITS: tl.constexpr = C.num_splits
    for split in tl.static_range(SPLITS):
        line = (split * num_rows + token).to(tl.int64)
        total += tl.load(sums_ptr + line * num_outputs + row, mask=inside, other=0.0)
    if C.has_bias:
        total += tl.load(bias_ptr + row, mask=inside, other=0.0)
    target = out_ptr + token.to(tl.int64) * out_stride + col + row
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row", "num_rows", "count"])
def decode_rows_kernel(
    ids_ptr, codes_ptr, scales_ptr, minimums_ptr, out_ptr, count, num_rows, stride, out_stride, first_row, scale,
    HAS_IDS: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of the matrix (ids[i] - first_row, or first_row + i) times scale; zeros where there is no such row."""
    let_next_start(PDL)
    target = tl.program_id(0) * C.block_n + tl.arange(0, C.block_n)
    word = tl.program_id(1) * C.block_w + tl.arange(0, C.block_w)
    in_targets = target < count
    wait_for_previous(PDL)
    if HAS_IDS:
        row = tl.load(ids_ptr + target, mask=in_targets, other=-1).to(tl.int64) - first_row
    else:
        row = target.to(tl.int64) + first_row
    in_rows = in_targets & (row >= 0) & (row < num_rows)
    mask = in_rows[:, None] & (word < C.num_words)[None, :]
    words = tl.load(codes_ptr + row[:, None] * C.num_words + word[None, :], mask=mask, other=0)
    if C.bits == 8:
        words = words ^ C.flip
    dtype = out_ptr.dtype.element_ty
    PLANES: tl.constexpr = C.num_planes
    for plane in tl.static_range(PLANES):
        column = word // 16 * C.chunk + plane * 16 + word % 16
        inside = column < C.num_inputs
        place = (column // C.group)[None, :].to(tl.int64) * stride + row[:, None]
        weights = _field(words, plane, C) - C.field_excess(plane)
        weights *= tl.load(scales_ptr + place, mask=mask & inside[None, :], other=0.0).to(tl.float32)
        if C.has_minimums:
            weights += tl.load(minimums_ptr + place, mask=mask & inside[None, :], other=0.0).to(tl.float32)
        weights = weights.to(dtype).to(tl.float32)
        goal = out_ptr + target.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(goal, (weights * scale).to(dtype), mask=in_targets[:, None] & inside[None, :])
