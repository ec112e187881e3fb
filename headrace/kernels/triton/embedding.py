"""embedding and gather_rows: rows of a table by index."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous

_BLOCK = 1024


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scale: float = 1.0,
    first_row: int | None = None,
) -> None:
    """See ``headrace.kernels.reference.embedding.embedding``."""
    _launch(weight, ids, out, _rounded(scale, out.dtype), first_row or 0, len(weight))


def gather_rows(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """See ``headrace.kernels.reference.embedding.gather_rows``."""
    _launch(x, index, out, 1.0, 0, len(x))


@functools.cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(scale, dtype=dtype, device="cpu").item())


def _launch(
    table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, scale: float, first_row: int, num_rows: int
) -> None:
    width = table.shape[1]
    if len(ids) == 0:
        return
    _gather_kernel[(len(ids), triton.cdiv(width, _BLOCK))](
        table,
        ids,
        out,
        table.stride(0),
        out.stride(0),
        scale,
        first_row,
        num_rows,
        WIDTH=width,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["first_row", "num_rows"], do_not_specialize_on_alignment=["ids_ptr"])
def _gather_kernel(
    table_ptr,
    ids_ptr,
    out_ptr,
    table_stride,
    out_stride,
    scale,
    first_row,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    target = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < WIDTH
    wait_for_previous(PDL)
    row = tl.load(ids_ptr + target).to(tl.int64) - first_row
    is_known = (row >= 0) & (row < num_rows)
    values = tl.load(table_ptr + row * table_stride + col, mask=inside & is_known, other=0.0)
    dtype = out_ptr.dtype.element_ty
    # a narrower table widens first, then one rounding for the product
    scaled = (values.to(dtype).to(tl.float32) * scale).to(dtype)
    tl.store(out_ptr + target * out_stride + col, scaled, mask=inside)
