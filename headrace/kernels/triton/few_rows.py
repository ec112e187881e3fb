"""linear of 2 to 64 rows on Hopper by ``few_rows_kernel``, which is faster than the library there."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.triton.few_rows_kernel import MAX_ROWS, TILE, few_rows_kernel
from headrace.kernels.triton.launch import (
    HOPPER_MULTIPROCESSORS,
    compile_ahead,
    has_wgmma,
    launch_options,
)

WARM_ROWS = (16, 32, 64)
"""Numbers of rows that have kernels of their own."""

_SHARED_BYTES = 227 << 10
"""Of a program of Hopper's."""

_MIN_TILES = 64
_MIN_WEIGHTS = 1 << 16
"""Of a tile; smaller ones read x too often for what they do."""

_MIN_COPIED_ROWS = 16


@dataclass(frozen=True, slots=True)
class FewRowsShape:
    """How a product is made.

    rows: of x that are copied, a power of two from 16 on.
    block_n: outputs of a program, a power of two from 16 on.
    block_k: inputs of a round.
    """

    rows: int
    block_n: int
    block_k: int

    @property
    def num_stages(self) -> int:
        """Rounds in shared memory. Sums pass through some of it on their way out, fp32 at most."""
        reserved = 1024 + MAX_ROWS * self.block_n * 4
        return max(2, (_SHARED_BYTES - reserved) // ((MAX_ROWS + self.block_n) * self.block_k * 2))


@functools.cache
def few_rows_shape(num_rows: int, num_outputs: int, num_inputs: int) -> FewRowsShape | None:
    """As measured on an H200 (benchmarks/NOTES.md); None: there are too few outputs, or too many rows."""
    block_n = max(16, triton.next_power_of_2(triton.cdiv(num_outputs, HOPPER_MULTIPROCESSORS)))
    while block_n * num_inputs < _MIN_WEIGHTS and triton.cdiv(num_outputs, 2 * block_n) >= _MIN_TILES:
        block_n *= 2
    block_n = min(block_n, 128)
    if num_rows > MAX_ROWS or triton.cdiv(num_outputs, block_n) < _MIN_TILES:
        return None
    rows = max(_MIN_COPIED_ROWS, triton.next_power_of_2(num_rows))
    return FewRowsShape(rows, block_n, 256 if block_n <= 32 else 128)


def suits_few_rows(dtype: torch.dtype) -> bool:
    """Whether the device has the kernel's units, and for this type."""
    return has_wgmma() and dtype in (torch.bfloat16, torch.float16)


def takes_few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether device, types and places of the rows suit the kernel."""
    return (
        suits_few_rows(x.dtype)
        and x.dtype == weight.dtype
        and all(tensor.stride(1) == 1 and tensor.stride(0) % 8 == 0 for tensor in (x, weight))
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight))
    )


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    col: int,
    shape: FewRowsShape,
) -> None:
    """``linear`` of what ``takes_few_rows``; any shape of at least as many rows is right."""
    assert x.shape[0] <= shape.rows, (x.shape, shape)
    arguments, options = _launch(x, weight, bias, out, col, shape)
    few_rows_kernel[(triton.cdiv(weight.shape[0], shape.block_n),)](*arguments, **options)


def compile_few_rows(
    num_rows: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    *,
    has_bias: bool = False,
) -> None:
    """What products of so many rows need, for weights of ``sizes`` (outputs, inputs), without memory for them."""
    shape = few_rows_shape(num_rows, *sizes)
    if shape is not None:
        empty = partial(torch.empty, dtype=dtype, device="meta")
        bias, out = empty(sizes[0]) if has_bias else None, empty((num_rows, sizes[0]), dtype=out_dtype)
        arguments, options = _launch(empty((num_rows, sizes[1])), empty(sizes), bias, out, 0, shape)
        compile_ahead(few_rows_kernel, *arguments, **options)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    col: int,
    shape: FewRowsShape,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The kernel's arguments, and its options."""
    num_outputs, num_inputs = weight.shape
    arguments = (
        _row_tiles(x, shape.rows, shape.block_k),
        TensorDescriptor.from_tensor(weight, [shape.block_n, shape.block_k], TILE.value),
        x if bias is None else bias,
        out,
        x.shape[0],
        num_outputs,
        triton.cdiv(num_inputs, shape.block_k),
        col,
        out.stride(0),
    )
    options = {
        "NUM_STAGES": shape.num_stages,
        "HAS_BIAS": bias is not None,
        "num_warps": 4,
        **launch_options(),
    }
    return arguments, options


def _row_tiles(x: torch.Tensor, num_rows: int, block_k: int) -> TensorDescriptor:
    """Of x. The copy engine is slow with rows that it must make up, so those that lie behind x in its memory belong to
    it here, where there are as many."""
    end = x.storage_offset() + (num_rows - 1) * x.stride(0) + x.shape[1]
    has_all = end * x.element_size() <= x.untyped_storage().nbytes()
    size = [num_rows if has_all else x.shape[0], x.shape[1]]
    return TensorDescriptor(x, size, list(x.stride()), [num_rows, block_k], TILE.value)
