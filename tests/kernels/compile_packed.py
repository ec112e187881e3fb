"""Compiles the kernels of several rows of packed weights for Hopper, with the tiles that llama-3-8b's linears and head
take; run by test_triton_compiles in a process without the interpreter, which cannot run Gluon."""

from __future__ import annotations

import torch
from triton_timing import compiling_only  # of benchmarks/kernels

from headrace.kernels.triton.linear_packed import linear_packed
from headrace.kernels.triton.model_widths import PackedForm
from headrace.kernels.triton.packed_warmup import empty_matrix

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GATE_UP, DOWN, HEAD = (28672, 4096), (4096, 14336), (128256, 4096)
BY_32, WITH_MINIMUMS, BYTES = PackedForm(4, 32, False), PackedForm(4, 128, True), PackedForm(8, None, False)
CASES = [
    (BY_32, GATE_UP, 16, BF16, BF16, "packed_wgmma_kernel"),
    (WITH_MINIMUMS, DOWN, 48, FP16, FP16, "packed_wgmma_kernel"),
    (BY_32, GATE_UP, 256, BF16, BF16, "packed_pair_kernel"),
    (WITH_MINIMUMS, DOWN, 100, FP16, FP16, "packed_pair_kernel"),
    (BYTES, HEAD, 100, BF16, FP32, "packed_pair_kernel"),
]


def main() -> None:
    for form, sizes, num_rows, dtype, out_dtype, name in CASES:
        x = torch.empty((num_rows, sizes[1]), dtype=dtype, device="meta")
        out = torch.empty((num_rows, sizes[0]), dtype=out_dtype, device="meta")
        with compiling_only() as kernels:
            linear_packed(x, empty_matrix(form, sizes, x.device), None, out)
        assert kernels[0][0].endswith(f".{name}"), kernels
        print(f"compiled {form} of {sizes} for {num_rows} rows")


if __name__ == "__main__":
    main()
