"""soft_cap; see kernels/reference/elementwise.py."""

from __future__ import annotations

import torch

from headrace.kernels.native.native_op import native_op
from headrace.kernels.native.run import check_rows
from headrace.kernels.native.structs import DTYPES, SoftCapArgs


@native_op(lambda x, cap: 4 * x.numel())
def soft_cap(x: torch.Tensor, cap: float) -> SoftCapArgs:
    """See the reference."""
    check_rows(x=x)
    return SoftCapArgs(
        rows=x.shape[0],
        x=x.data_ptr(),
        stride=x.stride(0),
        width=x.shape[1],
        cap=cap,
        dtype=DTYPES[x.dtype],
    )
