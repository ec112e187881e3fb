"""linear: own kernels for a few rows, where reading the weights is all the work; cuBLAS for more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from headrace.kernels.triton.launch import launch_options
from headrace.kernels.triton.linear_kernels import gemv_kernel, skinny_kernel

_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class GemvShape:
    """Tile of the one-row kernel: rows of the weights a program, columns at once."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """Tile of the few-rows kernel.

    block_t: rows of x, padded.  block_n: rows of the weights a program.  block_k: columns a round.
    num_stages: rounds in flight.
    prefetch_bytes: of each row of the weights, asked for before the previous kernel has ended.
    """

    block_t: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    prefetch_bytes: int = 1024


MAX_SKINNY_ROWS = 16
"""From here on cuBLAS is faster (benchmarks/NOTES.md)."""


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, col: int = 0
) -> None:
    """See ``headrace.kernels.reference.linear.linear``."""
    num_rows = x.shape[0]
    if num_rows == 0:
        return
    if num_rows == 1 and _is_aligned(x, weight):
        gemv(x, weight, bias, out, col, gemv_shape(*weight.shape))
    elif num_rows <= MAX_SKINNY_ROWS and x.dtype != torch.float32 and _is_aligned(x, weight):
        skinny(x, weight, bias, out, col, skinny_shape(num_rows, *weight.shape))
    else:
        _cublas(x, weight, bias, out[:, col : col + weight.shape[0]])


def gemv_shape(num_outputs: int, num_inputs: int) -> GemvShape:
    """Few outputs need small tiles to fill the device."""
    block_k = min(1024, triton.next_power_of_2(num_inputs))
    return GemvShape(8 if num_outputs >= 16384 else 4, block_k, 4)


def skinny_shape(num_rows: int, num_outputs: int, num_inputs: int) -> SkinnyShape:
    """Few outputs need small tiles to fill the device."""
    block_t = max(16, triton.next_power_of_2(num_rows))
    return SkinnyShape(block_t, 32 if num_outputs >= 4096 else 16, 256, 4, 4)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    col: int,
    shape: GemvShape,
) -> None:
    """``linear`` of one row."""
    num_outputs, num_inputs = weight.shape
    gemv_kernel[(triton.cdiv(num_outputs, shape.block_n),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        num_outputs,
        col,
        weight.stride(0),
        K=num_inputs,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        HAS_BIAS=bias is not None,
        num_warps=shape.num_warps,
        **launch_options(),
    )


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    col: int,
    shape: SkinnyShape,
) -> None:
    """``linear`` of up to ``shape.block_t`` rows of a 16-bit type."""
    num_outputs, num_inputs = weight.shape
    row_bytes = num_inputs * weight.element_size()
    skinny_kernel[(triton.cdiv(num_outputs, shape.block_n),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        x.shape[0],
        num_outputs,
        col,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        K=num_inputs,
        BLOCK_T=shape.block_t,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        NUM_STAGES=shape.num_stages,
        PREFETCH_BYTES=min(shape.prefetch_bytes, row_bytes // 64 * 64) if launch_options()["PDL"] else 0,
        HAS_BIAS=bias is not None,
        num_warps=shape.num_warps,
        num_stages=1,
        **launch_options(),
    )


def _is_aligned(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether rows begin at 16-byte boundaries, so that threads can load 16 bytes at once."""
    return (
        weight.stride(1) == 1
        and x.stride(1) == 1
        and weight.stride(0) * weight.element_size() % _VECTOR_BYTES == 0
        and x.stride(0) * x.element_size() % _VECTOR_BYTES == 0
        and weight.data_ptr() % _VECTOR_BYTES == 0
        and x.data_ptr() % _VECTOR_BYTES == 0
    )


def _cublas(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor) -> None:
    if target.dtype == x.dtype:
        if bias is None:
            torch.mm(x, weight.t(), out=target)
        else:
            torch.addmm(bias, x, weight.t(), out=target)
        return
    if target.device.type == "cuda":
        torch.mm(x, weight.t(), out_dtype=target.dtype, out=target)
    else:
        target.copy_(torch.mm(x, weight.t()))
    if bias is not None:
        target.add_(bias)
