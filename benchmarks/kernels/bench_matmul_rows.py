"""Which way a decode step's matrix products are fastest, by number of rows: libraries, padding, and a tiled product.

    python benchmarks/kernels/bench_matmul_rows.py [--rows 64 256 448] [--matrix gate_up] [--ways cublas] [--json FILE]

For each matrix of Llama-3-8B and Qwen3-0.6B and each number of rows, microseconds in a CUDA graph over weights that
are not in the L2 and TFLOP/s of the rows asked for: torch's product through cuBLAS and through cuBLASLt, ``linear`` of
the engine ("own": by a kernel of its own up to 64 rows), and a persistent Triton product over tensor descriptors in
several tiles. What a padded step costs is the row of the padded number. The last table names the best way for each and,
with ``*``, where padding to a larger number of rows would be faster than the number itself. ``--compile-only`` compiles
the tiled product for Hopper without a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_timing import compiling_only, graph_us

from headrace.kernels.triton.linear import linear

MATRICES = {
    "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    "qwen qkv": (4096, 1024), "qwen out": (1024, 2048), "qwen gate_up": (6144, 1024), "qwen down": (1024, 3072),
    "head": (128256, 4096), "qwen head": (151936, 1024),
}  # fmt: skip
ROWS = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
TILES = [
    (128, 256, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (64, 256, 64, 4, 4),
    (256, 128, 64, 3, 8),
    (64, 128, 128, 3, 4),
]
"""Rows, outputs, inputs of a tile; rounds in flight; warps."""
_COLD_BYTES = 200 << 20
_NUM_PROGRAMS = 132


@triton.jit
def tiled_product_kernel(
    x_desc, weight_desc, out_desc, num_rows, num_outputs, num_inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """out [T, n] = x [T, K] @ weight [n, K]^T; the tiles of the same outputs follow each other, so that weights are
    read from memory once."""
    num_m = tl.cdiv(num_rows, BLOCK_M)
    num_tiles = num_m * tl.cdiv(num_outputs, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row, col = tile % num_m * BLOCK_M, tile // num_m * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, num_inputs, BLOCK_K, num_stages=NUM_STAGES):
            acc = tl.dot(x_desc.load([row, k]), weight_desc.load([col, k]).T, acc)
        out_desc.store([row, col], acc.to(tl.bfloat16))


def tiled_product(
    tile: tuple[int, int, int, int, int], x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    block_m, block_n, block_k, num_stages, num_warps = tile
    num_tiles = triton.cdiv(x.shape[0], block_m) * triton.cdiv(weight.shape[0], block_n)
    tiled_product_kernel[(min(_NUM_PROGRAMS, num_tiles),)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        TensorDescriptor.from_tensor(out, [block_m, block_n]),
        x.shape[0],
        *weight.shape,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NUM_STAGES=num_stages,
        num_warps=num_warps,
    )


def library_product(name: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.backends.cuda.preferred_blas_library(name)
    torch.mm(x, weight.t(), out=out)


Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def own_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """As the engine multiplies them."""
    torch.backends.cuda.preferred_blas_library("default")
    linear(x, weight, None, out)


def ways() -> dict[str, Way]:
    libraries: dict[str, Way] = {name: partial(library_product, name) for name in ("cublas", "cublaslt")}
    return libraries | {"own": own_product} | {str(tile): partial(tiled_product, tile) for tile in TILES}


def measure(matrix: str, num_rows: int, wanted: Sequence[str] | None = None) -> dict[str, float]:
    """Microseconds of each way; one that fails or is wrong is left out, and said."""
    num_outputs, num_inputs = MATRICES[matrix]
    copies = max(1, _COLD_BYTES // (2 * num_outputs * num_inputs))
    weights = [
        torch.randn(num_outputs, num_inputs, device="cuda").mul_(0.02).bfloat16() for _ in range(copies)
    ]
    x = torch.randn(num_rows, num_inputs, device="cuda").bfloat16()
    some = slice(0, 1024)  # outputs that are checked
    exact = x.double() @ weights[-1][some].double().t()
    found = {}
    for name, way in ways().items():
        if wanted and name not in wanted:
            continue
        out = torch.empty(num_rows, num_outputs, dtype=torch.bfloat16, device="cuda")
        try:
            found[name] = graph_us([partial(way, x, weight, out) for weight in weights])
            way(x, weights[-1], out)
            error = float((out[:, some].double() - exact).norm() / exact.norm())
            if not error < 1e-2:
                del found[name]
                print(f"  {matrix} {num_rows} {name}: WRONG, {error}")
        except Exception as error:
            print(f"  {matrix} {num_rows} {name}: {type(error).__name__} {str(error)[:150]}")
    return found


def compile_only() -> None:
    device = torch.device("meta")
    with compiling_only() as compiled:
        for tile in TILES:
            tensors = [
                torch.empty(shape, dtype=torch.bfloat16, device=device)
                for shape in ((448, 4096), (4096, 4096), (448, 4096))
            ]
            tiled_product(tile, *tensors)
    for tile, (_, kernel) in zip(TILES, compiled, strict=True):
        print(tile, "shared", kernel.metadata.shared)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--matrix", nargs="*", choices=list(MATRICES), default=list(MATRICES))
    parser.add_argument("--ways", nargs="*", help="cublas, cublaslt, own; left out: the tiled products too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    if args.compile_only:
        compile_only()
        return
    best: dict[str, dict[int, tuple[str, float]]] = {}
    records = []
    for matrix in args.matrix:
        num_outputs, num_inputs = MATRICES[matrix]
        for num_rows in sorted(args.rows):
            found = measure(matrix, num_rows, args.ways)
            flops = 2 * num_rows * num_outputs * num_inputs
            shown = ", ".join(f"{name} {us:.0f} ({flops / us / 1e6:.0f})" for name, us in found.items())
            print(f"{matrix:8s} {num_rows:4d} rows, us (TFLOP/s): {shown}", flush=True)
            name = min(found, key=found.__getitem__)
            best.setdefault(matrix, {})[num_rows] = (name, found[name])
            records.append({"matrix": matrix, "rows": num_rows, "us": found})
    for matrix, by_rows in best.items():
        for num_rows, (name, us) in by_rows.items():
            padded = min((other[1], rows) for rows, other in by_rows.items() if rows >= num_rows)
            mark = f" * {padded[1]} rows take {padded[0]:.0f}" if padded[1] != num_rows else ""
            print(f"best: {matrix:8s} {num_rows:4d} rows {us:7.0f} us {name}{mark}")
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
