"""rms_norm and add_rms_norm: one program a row, one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous

_ELEMENTS_PER_WARP = 512


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """See ``headrace.kernels.reference.norm.rms_norm``."""
    _launch(x, x, weight, eps, out, has_residual=False)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """See ``headrace.kernels.reference.norm.add_rms_norm``."""
    _launch(x, residual, weight, eps, out, has_residual=True)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    has_residual: bool,
) -> None:
    num_rows, width = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_RESIDUAL=has_residual,
        num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), 16),
        **launch_options(),
    )


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < WIDTH
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual_ptr + row * residual_stride + col
        total = (x + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(place, total, mask=inside)
        x = total.to(tl.float32)  # what is normalised is what was stored
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    normed = x * scale * weight
    tl.store(out_ptr + row * out_stride + col, normed.to(out_ptr.dtype.element_ty), mask=inside)
