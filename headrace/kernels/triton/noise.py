"""The stateless noise on the device: keys as ``headrace.runtime.noise`` makes them, and a number a token from a key.

Integers are bit for bit those of the references; logarithms may differ in the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous

_BLOCK = 128


def exponentials(key: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """See ``headrace.kernels.reference.noise.exponentials``: [R, V] float32 from keys [R] int64."""
    out = torch.empty((len(key), num_tokens), dtype=torch.float32, device=key.device)
    if out.numel():
        _exponentials_kernel[(triton.cdiv(num_tokens, _BLOCK), len(key))](
            key, out, num_tokens, BLOCK=_BLOCK, num_warps=1, **launch_options()
        )
    return out


@triton.jit
def exponential_of(key, token):
    """Exponentially distributed float32 > 0 of int32 tokens, by a scalar int64 key. Wellons' "lowbias32" mixes."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    x = token.to(tl.uint32) * tl.full([1], 0x9E3779B9, tl.uint32) + low
    x = (x ^ (x >> 16)) * tl.full([1], 0x7FEB352D, tl.uint32)
    x = x ^ high
    x = (x ^ (x >> 15)) * tl.full([1], 0x846CA68B, tl.uint32)
    x = x ^ (x >> 16)
    uniform = ((x >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # -log(1 - u) would lose all digits of small u
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    return tl.where(uniform < 0.01, series, -tl.log(1.0 - uniform))


@triton.jit(do_not_specialize=["num_tokens"])
def _exponentials_kernel(key_ptr, out_ptr, num_tokens, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    noise = exponential_of(tl.load(key_ptr + row), token)
    tl.store(out_ptr + row * num_tokens + token, noise, mask=token < num_tokens)
