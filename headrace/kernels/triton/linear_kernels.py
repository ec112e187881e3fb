"""The kernel of ``linear`` for one row of x, where reading the weights is all the work, with what stands around it.

Before the product may stand an RMSNorm of x, after it the addition to the residual stream or the gated activation:
with so little to compute, each launch left out saves more than the work itself takes. Roundings are those of the ops
that are replaced.

Legend: n outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from headrace.kernels.triton.activation import activate
from headrace.kernels.triton.launch import let_next_start, wait_for_previous
from headrace.kernels.triton.row_product import multiply


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """What the kernel is compiled for.

    num_inputs: K.
    block_n, block_k: outputs of a program, and inputs of one round.
    gate: "silu" or "gelu_tanh": outputs j and n + j of the weights [2n, K] become act(y[j]) * y[n + j]; "" is none.
    has_norm: x is normalised first.
    adds: the outputs are added to what ``out`` holds.
    """

    num_inputs: int
    block_n: int
    block_k: int
    gate: str = ""
    has_bias: bool = False
    has_norm: bool = False
    adds: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether there is an activation."""
        return self.gate != ""

    @property
    def is_silu(self) -> bool:
        """Whether it is silu."""
        return self.gate == "silu"

    @property
    def block_inputs(self) -> int:
        """K rounded up to a power of two."""
        return 1 << (self.num_inputs - 1).bit_length()

    @property
    def is_even(self) -> bool:
        """Whether all rounds are whole."""
        return self.num_inputs % self.block_k == 0

    @property
    def last(self) -> int:
        """Where the last round begins."""
        return (self.num_inputs - 1) // self.block_k * self.block_k


@triton.jit
def _load_weights(start, k, in_rows, C: tl.constexpr):
    """Columns [k, k + block_k) of some rows; they are read once, so they need not stay in the caches."""
    col = k + tl.arange(0, C.block_k)
    if C.is_even:
        inside = in_rows[:, None]
    else:
        inside = in_rows[:, None] & (col < C.num_inputs)[None, :]
    return tl.load(start + col[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _inverse_rms(x_ptr, eps, C: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of x."""
    col = tl.arange(0, C.block_inputs)
    x = tl.load(x_ptr + col, mask=col < C.num_inputs, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / C.num_inputs + eps)


@triton.jit
def _load_inputs(x_ptr, norm_ptr, scale, k, C: tl.constexpr):
    """fp32 columns [k, k + block_k) of x, normalised if it has to be."""
    col = k + tl.arange(0, C.block_k)
    if C.is_even:
        x = tl.load(x_ptr + col).to(tl.float32)
    else:
        x = tl.load(x_ptr + col, mask=col < C.num_inputs, other=0.0).to(tl.float32)
    if C.has_norm:
        norm = tl.load(norm_ptr + col, mask=col < C.num_inputs, other=0.0).to(tl.float32)
        x = (x * scale * norm).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _finish(y, up, bias_ptr, row, inside, out_ptr, out_col, n, C: tl.constexpr):
    """Bias, activation and residual of outputs ``y`` (and ``up``), and the store."""
    place = out_col + row
    dtype = out_ptr.dtype.element_ty
    if C.has_bias:
        y += tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)
        if C.is_gated:
            up += tl.load(bias_ptr + n + row, mask=inside, other=0.0).to(tl.float32)
    if C.is_gated:
        IS_SILU: tl.constexpr = C.is_silu
        y = activate(y.to(dtype).to(tl.float32), IS_SILU) * up.to(dtype).to(tl.float32)
    if C.adds:
        y = y.to(dtype).to(tl.float32) + tl.load(out_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["n", "out_col"])
def gemv_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, out_ptr, n, out_col, w_stride, eps, C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row of x. The next weights are on their way to registers while the last are multiplied.

    The first ones are asked for before the previous kernel has ended: they do not depend on it.
    """
    let_next_start(PDL)
    row = tl.program_id(0) * C.block_n + tl.arange(0, C.block_n)
    in_rows = row < n
    start = w_ptr + row.to(tl.int64)[:, None] * w_stride
    up_start = start
    if C.is_gated:
        up_start = start + n.to(tl.int64) * w_stride
    w = _load_weights(start, 0, in_rows, C)
    up_w = w
    if C.is_gated:
        up_w = _load_weights(up_start, 0, in_rows, C)
    wait_for_previous(PDL)
    scale = 1.0
    if C.has_norm:
        scale = _inverse_rms(x_ptr, eps, C)
    acc = tl.full([C.block_n, C.block_k // 8], 0.0, tl.float32)
    up = acc
    for k in range(C.block_k, C.num_inputs, C.block_k):
        following = _load_weights(start, k, in_rows, C)
        up_following = following
        if C.is_gated:
            up_following = _load_weights(up_start, k, in_rows, C)
        x = _load_inputs(x_ptr, norm_ptr, scale, k - C.block_k, C)
        acc = multiply(acc, w, x, C)
        w = following
        if C.is_gated:
            up = multiply(up, up_w, x, C)
            up_w = up_following
    x = _load_inputs(x_ptr, norm_ptr, scale, C.last, C)
    acc = multiply(acc, w, x, C)
    if C.is_gated:
        up = multiply(up, up_w, x, C)
    _finish(tl.sum(acc, axis=1), tl.sum(up, axis=1), bias_ptr, row, in_rows, out_ptr, out_col, n, C)
