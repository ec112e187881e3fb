"""Kernels of ``linear_packed``: one row of x, several rows, and decoding.

Legend: T rows of x, n outputs, K inputs, b bytes of a row of codes; a segment is neighbouring bytes whose columns share
a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from headrace.kernels.triton.launch import let_next_start, wait_for_previous


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """What a kernel is compiled for.

    num_inputs: K.  bits: 4 or 8.  group, segment: columns of a scale; bytes of a segment.
    block_t, block_n, block_b: rows of x and outputs of a program, bytes of codes of one round.
    """

    num_inputs: int
    bits: int
    group: int
    segment: int
    block_t: int
    block_n: int
    block_b: int
    has_minimums: bool
    has_bias: bool

    @property
    def is_halved(self) -> bool:
        """Whether a byte holds two codes."""
        return self.bits == 4

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes, in whole chunks of 64."""
        chunk = 128 if self.bits == 4 else 64
        return -(-self.num_inputs // chunk) * 64

    @property
    def num_segments(self) -> int:
        """Segments of one round."""
        return self.block_b // self.segment

    @property
    def offset(self) -> float:
        """What is subtracted from codes."""
        return 8.0 if self.bits == 4 and not self.has_minimums else 0.0


@triton.jit
def _column(byte, IS_HALVED: tl.constexpr):
    """The first column in a byte of codes; the second is 64 further."""
    return (byte // 64) * 128 + byte % 64 if IS_HALVED else byte


@triton.jit
def _half(codes, HIGH: tl.constexpr, C: tl.constexpr):
    """Codes less their offset as fp32."""
    if C.is_halved:
        codes = (codes >> 4) if HIGH else (codes & 15)
    return codes.to(tl.float32) - C.offset


@triton.jit
def _scales_of(pointer, row, row_inside, first_byte, num_groups, HIGH: tl.constexpr, C: tl.constexpr):
    """[rows, segments] fp32 of the round that begins at ``first_byte``; zeros beyond the matrix."""
    byte = first_byte + tl.arange(0, C.num_segments) * C.segment
    column = _column(byte, C.is_halved)
    if HIGH:
        column += 64
    group = column // C.group
    inside = row_inside[:, None] & (group < num_groups)[None, :]
    return tl.load(
        pointer + row[:, None].to(tl.int64) * num_groups + group[None, :], mask=inside, other=0.0
    ).to(tl.float32)


@triton.jit
def _row_part(
    codes, x_ptr, scales_ptr, minimums_ptr, row, row_inside, first_byte, num_groups,
    HIGH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """[rows]: sums over one half of a round's columns."""
    byte = first_byte + tl.arange(0, C.block_b)
    column = _column(byte, C.is_halved)
    if HIGH:
        column += 64
    x = tl.load(x_ptr + column, mask=column < C.num_inputs, other=0.0).to(tl.float32)
    products = _half(codes, HIGH, C) * x[None, :]
    sums = tl.sum(tl.reshape(products, [C.block_n, C.num_segments, C.segment]), axis=2)
    scaled = sums * _scales_of(scales_ptr, row, row_inside, first_byte, num_groups, HIGH, C)
    if C.has_minimums:
        x_sums = tl.sum(tl.reshape(x, [C.num_segments, C.segment]), axis=1)
        minimums = _scales_of(minimums_ptr, row, row_inside, first_byte, num_groups, HIGH, C)
        scaled += minimums * x_sums[None, :]
    return tl.sum(scaled, axis=1)


@triton.jit(do_not_specialize=["num_outputs", "col"])
def packed_row_kernel(
    x_ptr, codes_ptr, scales_ptr, minimums_ptr, bias_ptr, out_ptr,
    num_outputs, num_groups, col,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of x: sums within a segment, then scales."""
    let_next_start(PDL)
    row = tl.program_id(0) * C.block_n + tl.arange(0, C.block_n)
    inside = row < num_outputs
    start = row[:, None].to(tl.int64) * C.row_bytes
    wait_for_previous(PDL)
    total = tl.full([C.block_n], 0.0, tl.float32)
    for first in range(0, C.row_bytes, C.block_b):
        byte = first + tl.arange(0, C.block_b)
        mask = inside[:, None] & (byte < C.row_bytes)[None, :]
        codes = tl.load(codes_ptr + start + byte[None, :], mask=mask, other=0)
        total += _row_part(codes, x_ptr, scales_ptr, minimums_ptr, row, inside, first, num_groups, False, C)
        if C.is_halved:
            total += _row_part(
                codes, x_ptr, scales_ptr, minimums_ptr, row, inside, first, num_groups, True, C
            )
    if C.has_bias:
        total += tl.load(bias_ptr + row, mask=inside, other=0.0)
    tl.store(out_ptr + col + row, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _decoded(
    codes,
    scales_ptr,
    minimums_ptr,
    row,
    row_inside,
    first_byte,
    num_groups,
    HIGH: tl.constexpr,
    C: tl.constexpr,
):
    """[rows, block_b] fp32: the weights of one half of a round."""
    scales = _scales_of(scales_ptr, row, row_inside, first_byte, num_groups, HIGH, C)
    rows: tl.constexpr = codes.shape[0]
    by_segment = tl.reshape(_half(codes, HIGH, C), [rows, C.num_segments, C.segment])
    weights = by_segment * scales[:, :, None]
    if C.has_minimums:
        minimums = _scales_of(minimums_ptr, row, row_inside, first_byte, num_groups, HIGH, C)
        weights += minimums[:, :, None]
    return tl.reshape(weights, [rows, C.block_b])


@triton.jit
def _tile_part(
    total, codes, x_ptr, token, token_inside, x_stride, scales_ptr, minimums_ptr, row, row_inside, first_byte,
    num_groups, HIGH: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    column = _column(first_byte + tl.arange(0, C.block_b), C.is_halved)
    if HIGH:
        column += 64
    mask = token_inside[:, None] & (column < C.num_inputs)[None, :]
    x = tl.load(x_ptr + token[:, None].to(tl.int64) * x_stride + column[None, :], mask=mask, other=0.0)
    weights = _decoded(codes, scales_ptr, minimums_ptr, row, row_inside, first_byte, num_groups, HIGH, C)
    return tl.dot(x, tl.trans(weights.to(x.dtype)), total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "col"])
def packed_tile_kernel(
    x_ptr, codes_ptr, scales_ptr, minimums_ptr, bias_ptr, out_ptr,
    num_rows, num_outputs, num_groups, col, x_stride, out_stride,
    PRECISION: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Several rows of x: weights are decoded into the type of x, which is multiplied by tensor cores."""
    let_next_start(PDL)
    row = tl.program_id(0) * C.block_n + tl.arange(0, C.block_n)
    token = tl.program_id(1) * C.block_t + tl.arange(0, C.block_t)
    inside, token_inside = row < num_outputs, token < num_rows
    start = row[:, None].to(tl.int64) * C.row_bytes
    wait_for_previous(PDL)
    total = tl.full([C.block_t, C.block_n], 0.0, tl.float32)
    for first in range(0, C.row_bytes, C.block_b):
        byte = first + tl.arange(0, C.block_b)
        codes = tl.load(codes_ptr + start + byte[None, :], mask=inside[:, None], other=0)
        total = _tile_part(
            total, codes, x_ptr, token, token_inside, x_stride, scales_ptr, minimums_ptr, row, inside, first,
            num_groups, False, PRECISION, C,
        )  # fmt: skip
        if C.is_halved:
            total = _tile_part(
                total, codes, x_ptr, token, token_inside, x_stride, scales_ptr, minimums_ptr, row, inside, first,
                num_groups, True, PRECISION, C,
            )  # fmt: skip
    if C.has_bias:
        total += tl.load(bias_ptr + row, mask=inside, other=0.0)[None, :]
    target = out_ptr + token[:, None].to(tl.int64) * out_stride + col + row[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=token_inside[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def decode_rows_kernel(
    ids_ptr, codes_ptr, scales_ptr, minimums_ptr, out_ptr,
    num_rows, num_groups, out_stride, first_row, scale,
    HAS_IDS: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of the matrix (ids[i] - first_row, or first_row + i) times scale; zeros where there is no such row."""
    let_next_start(PDL)
    target = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * C.block_b
    wait_for_previous(PDL)
    index = tl.load(ids_ptr + target).to(tl.int64) - first_row if HAS_IDS else target + first_row
    row = index + tl.zeros([1], tl.int64)
    inside = (row >= 0) & (row < num_rows)
    byte = first + tl.arange(0, C.block_b)
    codes = tl.load(codes_ptr + row[:, None] * C.row_bytes + byte[None, :], mask=inside[:, None], other=0)
    dtype = out_ptr.dtype.element_ty
    for half in tl.static_range(2 if C.is_halved else 1):
        column = _column(byte, C.is_halved) + 64 * half
        weights = _decoded(codes, scales_ptr, minimums_ptr, row, inside, first, num_groups, half == 1, C)
        weights = tl.where(inside[:, None], weights, 0.0).to(dtype).to(tl.float32)
        mask = (column < C.num_inputs)[None, :]
        tl.store(out_ptr + target * out_stride + column[None, :], (weights * scale).to(dtype), mask=mask)
