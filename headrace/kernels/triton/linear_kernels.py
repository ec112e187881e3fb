"""Kernels of ``linear`` for a few rows of x, where reading the weights is all the work.

Legend: T rows of x, n outputs, K inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.launch import let_next_start, prefetch_rows, wait_for_previous


@triton.jit
def _prefetch_weights(w_ptr, first, n, w_stride, BLOCK_N: tl.constexpr, NUM_BYTES: tl.constexpr):
    """The first NUM_BYTES of rows [first, first + BLOCK_N) into the L2, in four pieces a row."""
    row = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1).to(tl.int64)
    PIECE: tl.constexpr = NUM_BYTES // 4
    start = w_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    row_bytes = row * w_stride * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    prefetch_rows(start + row_bytes[:, None] + tl.arange(0, 4)[None, :] * PIECE, PIECE)


@triton.jit
def _load_weights(start, k, in_rows, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [k, k + BLOCK_K) of some rows; they are read once, so they need not stay in the caches."""
    col = k + tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        inside = in_rows[:, None]
    else:
        inside = in_rows[:, None] & (col < K)[None, :]
    return tl.load(start + col[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _multiply(acc, w, x_ptr, k, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """acc [BLOCK_N, BLOCK_K / 8] plus the products with columns [k, k + BLOCK_K), eight by eight.

    The eight numbers of a sum are one thread's own: no data moves between threads before the end.
    """
    col = k + tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        x = tl.load(x_ptr + col)
    else:
        x = tl.load(x_ptr + col, mask=col < K, other=0.0)
    product = w.to(tl.float32) * x.to(tl.float32)[None, :]
    return acc + tl.sum(tl.reshape(product, [BLOCK_N, BLOCK_K // 8, 8]), axis=2)


@triton.jit(do_not_specialize=["n", "out_col"])
def gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    n,
    out_col,
    w_stride,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x. The next weights are on their way to registers while the last are multiplied.

    The first ones are asked for before the previous kernel has ended: they do not depend on it.
    """
    let_next_start(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < n
    start = w_ptr + row.to(tl.int64)[:, None] * w_stride
    w = _load_weights(start, 0, in_rows, K, BLOCK_K)
    wait_for_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for k in range(BLOCK_K, K, BLOCK_K):
        following = _load_weights(start, k, in_rows, K, BLOCK_K)
        acc = _multiply(acc, w, x_ptr, k - BLOCK_K, K, BLOCK_N, BLOCK_K)
        w = following
    LAST: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    acc = _multiply(acc, w, x_ptr, LAST, K, BLOCK_N, BLOCK_K)
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_col + row, y.to(out_ptr.dtype.element_ty), mask=in_rows)


@triton.jit(do_not_specialize=["num_rows", "n", "out_col"])
def skinny_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    n,
    out_col,
    x_stride,
    w_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to BLOCK_T rows of x: the weights are the tall operand of the matrix units, x the narrow one."""
    let_next_start(PDL)
    first = tl.program_id(0) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    in_rows = row < n
    token = tl.arange(0, BLOCK_T)
    in_tokens = token < num_rows
    w_start = w_ptr + row.to(tl.int64)[:, None] * w_stride
    x_start = x_ptr + token.to(tl.int64)[:, None] * x_stride
    if PREFETCH_BYTES > 0:
        _prefetch_weights(w_ptr, first, n, w_stride, BLOCK_N, PREFETCH_BYTES)
    wait_for_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        col = k + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            w = tl.load(
                w_start + col[None, :], mask=in_rows[:, None], other=0.0, eviction_policy="evict_first"
            )
            x = tl.load(x_start + col[None, :], mask=in_tokens[:, None], other=0.0)
        else:
            in_cols = (col < K)[None, :]
            w = tl.load(w_start + col[None, :], mask=in_rows[:, None] & in_cols, other=0.0)
            x = tl.load(x_start + col[None, :], mask=in_tokens[:, None] & in_cols, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    place = out_ptr + token.to(tl.int64)[None, :] * out_stride + out_col + row[:, None]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_tokens[None, :])
