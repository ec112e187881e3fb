"""soft_cap; see kernels/reference/elementwise.py."""

from __future__ import annotations

import torch

from headrace.kernels.native.run import check_rows, run
from headrace.kernels.native.structs import DTYPES, SoftCapArgs


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """See the reference."""
    run(soft_cap_args(x, cap), 4 * x.numel())


def soft_cap_args(x: torch.Tensor, cap: float) -> SoftCapArgs:
    """The struct of ``soft_cap``."""
    check_rows(x=x)
    return SoftCapArgs(
        rows=x.shape[0],
        x=x.data_ptr(),
        stride=x.stride(0),
        width=x.shape[1],
        cap=cap,
        dtype=DTYPES[x.dtype],
    )
