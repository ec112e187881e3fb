"""Products of one row with matrices inside a persistent kernel: each program has tiles of rows, and its first one is
loaded before the row is there."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from headrace.kernels.triton.activation import activate


@dataclass(frozen=True, slots=True)
class Share:
    """How the programs divide a matrix [n, k].

    block_n: rows of a program's tile (pairs of rows where two matrices are gated); tiles go round the programs.
    block_k: columns of one round.
    """

    n: int
    k: int
    block_n: int
    block_k: int

    @property
    def num_rounds(self) -> int:
        """Rounds of a row."""
        return -(-self.k // self.block_k)

    @property
    def is_even(self) -> bool:
        """Whether all rounds are whole."""
        return self.k % self.block_k == 0

    @property
    def num_tiles(self) -> int:
        """Tiles of the matrix."""
        return -(-self.n // self.block_n)


@triton.jit
def _tile_of(index, S: tl.constexpr):
    """(first row, first column) of a program's tile number ``index``; all columns of some rows come in a row."""
    row = (tl.program_id(0) + index // S.num_rounds * tl.num_programs(0)) * S.block_n
    return row, index % S.num_rounds * S.block_k


@triton.jit
def load_tile(w_ptr, index, S: tl.constexpr):
    """A program's tile number ``index`` [block_n, block_k], zeros outside; read once, so no cache need keep it."""
    first_row, k = _tile_of(index, S)
    row = first_row + tl.arange(0, S.block_n)
    col = k + tl.arange(0, S.block_k)
    inside = (row < S.n)[:, None]
    if not S.is_even:
        inside = inside & (col < S.k)[None, :]
    return tl.load(
        w_ptr + row.to(tl.int64)[:, None] * S.k + col[None, :],
        mask=inside,
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def _load_vector(x_ptr, k, S: tl.constexpr):
    """fp32 columns [k, k + block_k)."""
    col = k + tl.arange(0, S.block_k)
    if S.is_even:
        return tl.load(x_ptr + col).to(tl.float32)
    else:
        return tl.load(x_ptr + col, mask=col < S.k, other=0.0).to(tl.float32)


@triton.jit
def multiply(acc, w, x, S: tl.constexpr):
    """acc [block_n, block_k / 8] plus the products of one round, eight by eight.

    The eight numbers of a sum are one thread's own: no data moves between threads before the end.
    """
    product = tl.reshape(w.to(tl.float32) * x[None, :], [S.block_n, S.block_k // 8, 8])
    return acc + tl.sum(product, axis=2)


@triton.jit
def _num_tiles(S: tl.constexpr):
    """Tiles of this program."""
    return tl.cdiv(S.num_tiles - tl.program_id(0), tl.num_programs(0)) * S.num_rounds


@triton.jit
def product(w, w_ptr, bias_ptr, x_ptr, scale, out_ptr, S: tl.constexpr, HAS_BIAS: tl.constexpr):
    """out = scale * W x (+ bias); ``w`` is the first tile."""
    dtype = out_ptr.dtype.element_ty
    acc = tl.full([S.block_n, S.block_k // 8], 0.0, tl.float32)
    for index in range(_num_tiles(S)):
        following = load_tile(w_ptr, index + 1, S)
        first_row, k = _tile_of(index, S)
        acc = multiply(acc, w, _load_vector(x_ptr, k, S), S)
        w = following
        if index % S.num_rounds == S.num_rounds - 1:
            row = first_row + tl.arange(0, S.block_n)
            y = tl.sum(acc, axis=1) * scale
            if HAS_BIAS:
                y += tl.load(bias_ptr + row, mask=row < S.n, other=0.0).to(tl.float32)
            tl.store(out_ptr + row, y.to(dtype), mask=row < S.n)
            acc = tl.zeros_like(acc)


@triton.jit
def gated_product(gate, up, w_ptr, x_ptr, scale, out_ptr, S: tl.constexpr, IS_SILU: tl.constexpr):
    """out = act(scale * W_gate x) * (scale * W_up x); ``gate`` and ``up`` are the first tiles."""
    dtype = out_ptr.dtype.element_ty
    up_ptr = w_ptr + S.n * S.k
    gate_acc = tl.full([S.block_n, S.block_k // 8], 0.0, tl.float32)
    up_acc = gate_acc
    for index in range(_num_tiles(S)):
        next_gate = load_tile(w_ptr, index + 1, S)
        next_up = load_tile(up_ptr, index + 1, S)
        first_row, k = _tile_of(index, S)
        x = _load_vector(x_ptr, k, S)
        gate_acc = multiply(gate_acc, gate, x, S)
        up_acc = multiply(up_acc, up, x, S)
        gate, up = next_gate, next_up
        if index % S.num_rounds == S.num_rounds - 1:
            row = first_row + tl.arange(0, S.block_n)
            gated = activate((tl.sum(gate_acc, axis=1) * scale).to(dtype).to(tl.float32), IS_SILU)
            y = gated * (tl.sum(up_acc, axis=1) * scale).to(dtype).to(tl.float32)
            tl.store(out_ptr + row, y.to(dtype), mask=row < S.n)
            gate_acc, up_acc = tl.zeros_like(gate_acc), tl.zeros_like(up_acc)
