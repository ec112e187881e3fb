"""rms_norm and add_rms_norm; see kernels/reference/norm.py."""

from __future__ import annotations

import torch

from headrace.kernels.native.native_op import native_op
from headrace.kernels.native.run import check_rows
from headrace.kernels.native.structs import DTYPES, RmsNormArgs


@native_op(lambda x, *_, **__: 2 * x.numel())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> RmsNormArgs:
    """See the reference."""
    check_rows(x=x, weight=weight, out=out)
    assert x.dtype == out.dtype and weight.dtype == torch.float32 and weight.shape == x.shape[1:]
    return RmsNormArgs(
        rows=x.shape[0],
        x=x.data_ptr(),
        residual=None,
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        residual_stride=0,
        out_stride=out.stride(0),
        width=x.shape[1],
        eps=eps,
        dtype=DTYPES[x.dtype],
    )


@native_op(lambda x, *_, **__: 3 * x.numel())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> RmsNormArgs:
    """See the reference."""
    check_rows(residual=residual)
    assert residual.dtype == x.dtype and residual.shape == x.shape
    args = rms_norm.fill(x, weight, eps, out)
    args.residual = residual.data_ptr()
    args.residual_stride = residual.stride(0)
    return args
