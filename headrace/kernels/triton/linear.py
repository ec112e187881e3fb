"""linear: own kernels for one row and, on Hopper, for a few, where reading the weights is all the work; else cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from headrace.kernels.triton.few_rows import few_rows, few_rows_shape, takes_few_rows
from headrace.kernels.triton.launch import launch_options
from headrace.kernels.triton.linear_kernels import LinearConfig, gemv_kernel

_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class GemvShape:
    """Tile of the one-row kernel: rows of the weights a program, columns a round."""

    block_n: int
    block_k: int
    num_warps: int


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, col: int = 0
) -> None:
    """See ``headrace.kernels.reference.linear.linear``."""
    num_rows = x.shape[0]
    if num_rows == 0:
        return
    if num_rows == 1 and is_aligned(x, weight):
        gemv(x, weight, bias, out, col)
        return
    shape = few_rows_shape(num_rows, *weight.shape) if takes_few_rows(x, weight) else None
    if shape is not None:
        few_rows(x, weight, bias, out, col, shape)
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
    else:  # has no out_dtype
        torch.mm(x.to(target.dtype), weight.t().to(target.dtype), out=target)
    if bias is not None:
        target.add_(bias)


def gemv_shape(num_outputs: int, num_inputs: int) -> GemvShape:
    """Few outputs need small tiles to fill the device."""
    block_k = min(1024, triton.next_power_of_2(num_inputs))
    return GemvShape(8 if num_outputs >= 16384 else 4, block_k, 4)


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
