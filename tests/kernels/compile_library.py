"""Compiles the kernels around a library's attention for Hopper, with no GPU; run by test_triton_compiles."""

from __future__ import annotations

import torch
from triton_timing import compiling_only  # of benchmarks/kernels

from headrace.kernels.triton.library_attention import AttentionLibrary


def main() -> None:
    for num_heads, num_kv_heads, head_dim, dtype in (
        (32, 8, 128, torch.bfloat16),
        (9, 3, 64, torch.float16),
        (14, 2, 80, torch.bfloat16),
    ):
        heads = (num_heads, num_kv_heads, head_dim, 16)
        library = AttentionLibrary(*heads, dtype, torch.device("cpu"), max_rows=16, max_piece=16)
        with compiling_only() as kernels:
            library._compile()
        print(f"compiled {len(kernels)} for heads of {head_dim}", flush=True)


if __name__ == "__main__":
    main()
