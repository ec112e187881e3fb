"""soft_cap in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous

_BLOCK = 2048


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """See ``headrace.kernels.reference.elementwise.soft_cap``."""
    num_rows, width = x.shape
    if num_rows == 0:
        return
    grid = (triton.cdiv(width, _BLOCK), num_rows)
    _soft_cap_kernel[grid](x, x.stride(0), width, cap, BLOCK=_BLOCK, num_warps=4, **launch_options())


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap) in fp32."""
    return cap - 2.0 * cap / (1.0 + tl.exp(2.0 * x / cap))


@triton.jit
def _soft_cap_kernel(x_ptr, x_stride, width, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    place = x_ptr + tl.program_id(1).to(tl.int64) * x_stride + col
    wait_for_previous(PDL)
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, capped(x, cap).to(x_ptr.dtype.element_ty), mask=inside)
