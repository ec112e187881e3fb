"""embedding and gather_rows; see kernels/reference/embedding.py."""

from __future__ import annotations

import torch

from headrace.kernels.native.linear import PackedWeight
from headrace.kernels.native.native_op import native_op
from headrace.kernels.native.run import check_rows
from headrace.kernels.native.structs import DTYPES, EmbeddingArgs, GatherRowsArgs


@native_op(lambda ids, weight, out, *_, **__: out.numel())
def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    out: torch.Tensor,
    scale: float = 1.0,
    first_row: int | None = None,
) -> EmbeddingArgs:
    """See the reference; the table may be packed for ``linear``."""
    table = weight.data if isinstance(weight, PackedWeight) else weight
    num_rows, width = weight.shape
    check_rows(weight=table, out=out)
    assert ids.is_contiguous() and ids.dtype == torch.int64 and out.shape[1] == width
    return EmbeddingArgs(
        rows=len(ids),
        ids=ids.data_ptr(),
        weight=table.data_ptr(),
        out=out.data_ptr(),
        weight_stride=table.stride(0),
        out_stride=out.stride(0),
        width=width,
        first_row=first_row or 0,
        num_table_rows=num_rows,
        scale=torch.tensor(scale, dtype=out.dtype, device="cpu").item(),
        weight_dtype=DTYPES[table.dtype],
        out_dtype=DTYPES[out.dtype],
        is_packed=isinstance(weight, PackedWeight),
    )


@native_op(lambda x, index, out: out.numel())
def gather_rows(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> GatherRowsArgs:
    """See the reference."""
    check_rows(x=x, out=out)
    assert index.is_contiguous() and index.dtype == torch.int64 and x.dtype == out.dtype
    size = x.element_size()
    return GatherRowsArgs(
        rows=len(index),
        x=x.data_ptr(),
        index=index.data_ptr(),
        out=out.data_ptr(),
        x_stride_bytes=x.stride(0) * size,
        out_stride_bytes=out.stride(0) * size,
        row_bytes=x.shape[1] * size,
    )
