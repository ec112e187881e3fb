"""Compiles the kernels of quantized KV caches for Hopper, with no GPU; run by test_triton_compiles as a program."""

from __future__ import annotations

import torch
from triton_timing import compiling_only  # of benchmarks/kernels

from headrace.attention.base import AttentionShape
from headrace.attention.triton import TritonBackend
from headrace.kernels.quantized_cache import KV_FORMATS
from headrace.kernels.triton.attention import attention
from headrace.kernels.triton.rope_and_store import rope_and_store
from tests.kernels.paged_step import make_step, quantized


def main() -> None:
    meta = torch.device("meta")
    for head_dim in (64, 80, 128):
        shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=head_dim)
        step = make_step([100, 1], [300, 20], shape, torch.device("cpu"), torch.bfloat16)
        plan = TritonBackend(shape, torch.device("cpu")).plan(step.metadata)
        for name in KV_FORMATS:
            _, keys, values = quantized(step, name)
            qkv, out = step.qkv.to(meta), torch.empty(101, 8 * head_dim, dtype=torch.bfloat16, device=meta)
            numbers, cos_sin = torch.arange(101), torch.ones(101, head_dim)
            with compiling_only():
                attention(qkv, keys, values, plan, out, 8, 2, head_dim, 1.0, None)
                rope_and_store(qkv, None, None, 0.0, cos_sin, numbers, numbers, keys, values, 8, 2, head_dim)
            print(name, head_dim, "compiled", flush=True)


if __name__ == "__main__":
    main()
