"""Compiles the kernel of a few rows for Hopper; run by test_triton_compiles in a process without the interpreter, which
cannot run Gluon."""

from __future__ import annotations

import torch
from triton_timing import compiling_only  # of benchmarks/kernels

from headrace.kernels.triton.few_rows import few_rows, few_rows_shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    ((28672, 4096), 5, BF16, BF16, False),
    ((4096, 14336), 24, FP16, FP16, True),
    ((128256, 4096), 64, BF16, FP32, False),
    ((1024, 2048), 33, BF16, BF16, True),
]


def main() -> None:
    for sizes, num_rows, dtype, out_dtype, has_bias in CASES:
        x = torch.empty((num_rows, sizes[1]), dtype=dtype, device="meta")
        weight = torch.empty(sizes, dtype=dtype, device="meta")
        out = torch.empty((num_rows, sizes[0]), dtype=out_dtype, device="meta")
        shape = few_rows_shape(num_rows, *sizes)
        assert shape is not None
        with compiling_only() as kernels:
            few_rows(x, weight, weight[:, 0] if has_bias else None, out, 0, shape)
        assert kernels[0][0].endswith(".few_rows_kernel"), kernels
        print(f"compiled {shape} for {num_rows} rows")


if __name__ == "__main__":
    main()
