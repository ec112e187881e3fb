"""Compiles attention of prompt chunks for Hopper, by warps with roles; run by test_triton_compiles in a process without
the interpreter, which cannot run Gluon."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from triton_timing import compiling_only  # of benchmarks/kernels

from headrace.kernels.triton.attention import WORK_KEY, attention
from headrace.kernels.triton.attention_work import PackedWork

CASES = [
    (32, 8, 128, 16, torch.bfloat16, None, "hopper_tiles_kernel"),
    (28, 4, 128, 64, torch.float16, None, "hopper_tiles_kernel"),
    (9, 3, 128, 32, torch.bfloat16, None, "hopper_tiles_kernel"),
    (32, 8, 128, 16, torch.bfloat16, 4096, "long_tiles_kernel"),
]
"""Heads, KV heads, head dim, block size, type, window, and which kernel takes them."""


def main() -> None:
    for num_heads, num_kv_heads, head_dim, block_size, dtype, window, name in CASES:
        blocks = torch.empty((9, 2, 2, num_kv_heads, block_size, head_dim), dtype=dtype, device="meta")
        qkv = torch.empty((64, (num_heads + 2 * num_kv_heads) * head_dim), dtype=dtype, device="meta")
        out = torch.empty((64, num_heads * head_dim), dtype=dtype, device="meta")
        work = PackedWork(torch.empty(64, dtype=torch.int32, device="meta"), 0, 1, 0, 0)
        table = torch.empty((1, 9), dtype=torch.int32, device="meta")
        plan = SimpleNamespace(block_table=table, window=window, derived={WORK_KEY: work})
        with compiling_only() as kernels:
            attention(
                qkv, blocks[:, 1, 0], blocks[:, 1, 1], plan, out, num_heads, num_kv_heads, head_dim, 1.0
            )
        assert kernels[0][0].endswith(f".{name}"), kernels
        print(f"compiled {name} for {num_heads}/{num_kv_heads} heads of {head_dim}, blocks of {block_size}")


if __name__ == "__main__":
    main()
