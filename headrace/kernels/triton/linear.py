"""linear: own kernels for a few rows, where reading the weights is all the work; cuBLAS for more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from headrace.kernels.triton.launch import launch_options
from headrace.kernels.triton.linear_kernels import LinearConfig, gemv_kernel, skinny_kernel, sum_splits_kernel

_VECTOR_BYTES = 16
_SUMS_PER_PROGRAM = 1024

MAX_SKINNY_ROWS = 8
"""Beyond it cuBLAS is faster: a step's linears of llama-3-8b take 4.73 to 4.97 ms at 16 rows here and 4.04 there, 4.16
and 4.03 at 8, where fusing pays (benchmarks/NOTES.md)."""


@dataclass(frozen=True, slots=True)
class GemvShape:
    """Tile of the one-row kernel: rows of the weights a program, columns a round."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """Tile of the few-rows kernel.

    block_t: rows of x, padded.  block_n: rows of the weights a program.  block_k: columns a round.
    num_stages: rounds in flight.
    num_splits: parts of the columns, each a program's, where there are too few outputs to fill the device.
    prefetch_bytes: of each row of the weights, asked for before the previous kernel has ended.
    """

    block_t: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    num_splits: int = 1
    prefetch_bytes: int = 1024


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, col: int = 0
) -> None:
    """See ``headrace.kernels.reference.linear.linear``."""
    num_rows = x.shape[0]
    if num_rows == 0:
        return
    if num_rows == 1 and is_aligned(x, weight):
        gemv(x, weight, bias, out, col)
    elif num_rows <= MAX_SKINNY_ROWS and x.dtype != torch.float32 and is_aligned(x, weight):
        skinny(x, weight, bias, out, col)
    else:
        cublas(x, weight, bias, out, col)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """The form that ``linear`` reads: row after row."""
    return weight.contiguous()


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    col: int = 0,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gate: str = "",
    adds: bool = False,
    shape: GemvShape | None = None,
) -> None:
    """``linear`` of one row; see ``LinearConfig`` for ``gate`` and ``adds``.

    Args:
        norm: (weight, eps) of an RMSNorm of x before the product.
    """
    num_outputs, num_inputs = weight.shape
    if gate:
        num_outputs //= 2
    shape = shape or gemv_shape(*weight.shape)
    norm_weight, eps = norm or (x, 0.0)
    config = LinearConfig(
        num_inputs,
        shape.block_n if not gate else max(shape.block_n // 2, 1),
        shape.block_k,
        gate,
        has_bias=bias is not None,
        has_norm=norm is not None,
        adds=adds,
    )
    gemv_kernel[(triton.cdiv(num_outputs, config.block_n),)](
        x,
        weight,
        x if bias is None else bias,
        norm_weight,
        out,
        num_outputs,
        col,
        weight.stride(0),
        eps,
        C=config,
        num_warps=shape.num_warps,
        **launch_options(),
    )


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    col: int = 0,
    *,
    gate: str = "",
    adds: bool = False,
    shape: SkinnyShape | None = None,
) -> None:
    """``linear`` of up to ``shape.block_t`` rows of a 16-bit type; see ``LinearConfig`` for ``gate`` and ``adds``."""
    num_outputs, num_inputs = weight.shape
    if gate:
        num_outputs //= 2
    shape = shape or skinny_shape(x.shape[0], *weight.shape)
    config = LinearConfig(
        num_inputs, shape.block_n, shape.block_k, gate, has_bias=bias is not None, adds=adds
    )
    options = {"C": config, **launch_options()}
    target, splits = out, shape.num_splits
    if splits > 1:
        assert not gate, "a gate needs the whole sums"
        target = torch.empty((splits, x.shape[0], num_outputs), dtype=torch.float32, device=x.device)
    # what is asked for ahead must lie within the rows
    share = min(config.share(splits), num_inputs)
    row_bytes = share * weight.element_size() if num_inputs % share == 0 else 0
    skinny_kernel[(triton.cdiv(num_outputs, shape.block_n), splits)](
        x,
        weight,
        x if bias is None else bias,
        target,
        x.shape[0],
        num_outputs,
        col,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        BLOCK_T=shape.block_t,
        NUM_STAGES=shape.num_stages,
        NUM_SPLITS=splits,
        PREFETCH_BYTES=min(shape.prefetch_bytes, row_bytes // 64 * 64) if options["PDL"] else 0,
        num_warps=shape.num_warps,
        num_stages=1,
        **options,
    )
    if splits > 1:
        sum_splits_kernel[(triton.cdiv(num_outputs, _SUMS_PER_PROGRAM), x.shape[0])](
            target,
            x if bias is None else bias,
            out,
            x.shape[0],
            num_outputs,
            col,
            out.stride(0),
            NUM_SPLITS=splits,
            BLOCK=_SUMS_PER_PROGRAM,
            num_warps=4,
            **options,
        )


def cublas(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, col: int = 0
) -> None:
    """``linear`` by torch's library."""
    target = out[:, col : col + weight.shape[0]]
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


def gemv_shape(num_outputs: int, num_inputs: int) -> GemvShape:
    """Few outputs need small tiles to fill the device."""
    block_k = min(1024, triton.next_power_of_2(num_inputs))
    return GemvShape(8 if num_outputs >= 16384 else 4, block_k, 4)


def skinny_shape(num_rows: int, num_outputs: int, num_inputs: int) -> SkinnyShape:
    """Few outputs need small tiles to fill the device."""
    block_t = max(16, triton.next_power_of_2(num_rows))
    return SkinnyShape(block_t, 32 if num_outputs >= 4096 else 16, 256, 4, 4)


def is_aligned(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether rows begin at 16-byte boundaries, so that threads can load 16 bytes at once."""
    return (
        weight.stride(1) == 1
        and x.stride(1) == 1
        and weight.stride(0) * weight.element_size() % _VECTOR_BYTES == 0
        and x.stride(0) * x.element_size() % _VECTOR_BYTES == 0
        and weight.data_ptr() % _VECTOR_BYTES == 0
        and x.data_ptr() % _VECTOR_BYTES == 0
    )
