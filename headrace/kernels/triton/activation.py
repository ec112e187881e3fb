"""gated_act: the activation of the feed-forward block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous

_BLOCK = 1024


def gated_act(gate_up: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    """See ``headrace.kernels.reference.activation.gated_act``."""
    assert kind in ("silu", "gelu_tanh"), kind
    num_rows, width = out.shape
    if num_rows == 0:
        return
    _gated_act_kernel[(triton.cdiv(width, _BLOCK), num_rows)](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=_BLOCK,
        IS_SILU=kind == "silu",
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def activate(gate, IS_SILU: tl.constexpr):
    """silu(gate), or gelu(gate) with tanh written as a sigmoid: tanh(y) = 2 sigmoid(2 y) - 1. fp32."""
    if IS_SILU:
        return gate * tl.sigmoid(gate)
    else:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def _gated_act_kernel(
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < WIDTH
    wait_for_previous(PDL)
    gate = tl.load(gate_up_ptr + row * gate_up_stride + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * gate_up_stride + WIDTH + col, mask=inside, other=0.0).to(tl.float32)
    out = activate(gate, IS_SILU) * up
    tl.store(out_ptr + row * out_stride + col, out.to(out_ptr.dtype.element_ty), mask=inside)
