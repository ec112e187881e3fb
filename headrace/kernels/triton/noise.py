"""The stateless noise of ``headrace.runtime.noise`` computed on the device, bit for bit the same."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous

_BLOCK = 128


def uniforms(
    sample_seed: torch.Tensor, child_index: torch.Tensor, position: torch.Tensor, stream: int = 0
) -> torch.Tensor:
    """A number in [0, 1) for each (seed, child, position), [N] float64.

    Args:
        sample_seed, child_index, position: [N] int64.
    """
    out = torch.empty(len(position), dtype=torch.float64, device=position.device)
    if len(out):
        _uniforms_kernel[(triton.cdiv(len(out), _BLOCK),)](
            sample_seed,
            child_index,
            position,
            out,
            len(out),
            STREAM=stream,
            BLOCK=_BLOCK,
            num_warps=1,
            **launch_options(),
        )
    return out


@triton.jit
def _mix(x):
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014), on uint64."""
    x = (x ^ (x >> 30)) * tl.full([1], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([1], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def uniform_of(seed, child, position, STREAM: tl.constexpr):
    """float64 tensors in [0, 1) from int64 tensors."""
    golden = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    x = _mix(seed.to(tl.uint64) + (child + 1).to(tl.uint64) * golden)
    x = _mix(x + (position + 1).to(tl.uint64) * golden)
    x = _mix(x + tl.full([1], STREAM + 1, tl.uint64) * golden)
    return (x >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["num_numbers"])
def _uniforms_kernel(
    seed_ptr,
    child_ptr,
    position_ptr,
    out_ptr,
    num_numbers,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_numbers
    wait_for_previous(PDL)
    seed = tl.load(seed_ptr + index, mask=inside, other=0)
    child = tl.load(child_ptr + index, mask=inside, other=0)
    position = tl.load(position_ptr + index, mask=inside, other=0)
    tl.store(out_ptr + index, uniform_of(seed, child, position, STREAM), mask=inside)
