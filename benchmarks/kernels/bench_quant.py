"""Linears of packed weights on one GPU: a whole decoding step's matrices of Llama-3-8B, against bf16, by batch.

Each batch size runs the step's four linears of a layer, over more weights than fit the L2,
within CUDA graphs; figures are scaled to 32 layers. Every packed result is compared with decoded weights first.

    PYTHONPATH=. python benchmarks/kernels/bench_quant.py            # table; --json FILE keeps it
    PYTHONPATH=. python benchmarks/kernels/bench_quant.py --variants          # tiles to choose from, each checked
    PYTHONPATH=. python benchmarks/kernels/bench_quant.py --compile-only      # without a GPU: do the kernels compile?
    PYTHONPATH=. python benchmarks/kernels/bench_quant.py --kv [--variants]   # attention of decodes over 8-bit caches
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from kv_variants import compare, compile_part
from quant_variants import (
    LAYER,
    NUM_LAYERS,
    VARIANT_BATCHES,
    compile_in_processes,
    compile_variants,
    copy_of,
    meta_matrix,
    run_variants,
)
from triton_timing import MEMORY_BYTES_PER_S, compiling_only, graph_us

from headrace.kernels.triton.linear import linear
from headrace.kernels.triton.linear_packed import embedding_packed, linear_packed, pack_matrix
from headrace.kernels.triton.word_matrix import WordMatrix
from headrace.quant.precision import Rounding, parse_form
from headrace.quant.rounding import round_weights

HEAD = (128_256, 4096)
COPIES = 3
FORMS = ("int4-g32", "int4", "int4-g128", "int8", "int8-g32")
CHECKED_ROWS = (1, 2, 8, 16, 17, 31, 33, 64, 100, 128, 200, 256, 300, 1100)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--kv", action="store_true")
    parser.add_argument("--part", default="0/1", help="i/n: compile only every n-th from the i-th on")
    parser.add_argument("--processes", type=int, default=14, help="that compile ahead")
    parser.add_argument("--seconds", type=float, default=75.0, help="no variant is begun after this time")
    args = parser.parse_args()
    if args.kv:
        attend(args)
        return
    args.batches = args.batches or list(VARIANT_BATCHES if args.variants else BATCHES)
    if args.variants:
        variants(args)
        return
    if args.compile_only:
        compile_all(args.forms, args.batches, *map(int, args.part.split("/")))
        return
    rows = sorted({*args.batches, *CHECKED_ROWS})
    options = ["--forms", *args.forms, "--batches", *map(str, rows)]
    compile_in_processes(options, args.processes)
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; Llama-3-8B's linears, ms a step")
    figures: dict[str, dict[int, float]] = {"bf16": {}}
    plain = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in LAYER.values()]
    layers = [plain, *([weight.clone() for weight in plain] for _ in range(COPIES - 1))]
    for batch in args.batches:
        figures["bf16"][batch] = step_ms(layers, batch, device, lambda x, w, out: linear(x, w, None, out))
    del layers
    for text in args.forms:
        rounding = parse_form(text)
        assert isinstance(rounding, Rounding)
        packed = [pack_matrix(round_weights(weight, rounding)) for weight in plain]
        check(packed, device)
        layers_packed = [packed, *([copy_of(matrix) for matrix in packed] for _ in range(COPIES - 1))]
        figures[text] = {
            batch: step_ms(layers_packed, batch, device, lambda x, w, out: linear_packed(x, w, None, out))
            for batch in args.batches
        }
        num_bytes = NUM_LAYERS * sum(matrix.num_bytes for matrix in packed)
        limit = 1e3 * num_bytes / MEMORY_BYTES_PER_S
        print(f"{text}: {num_bytes / 1e9:.2f} GB, {limit:.2f} ms by bandwidth")
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def variants(args: argparse.Namespace) -> None:
    if args.compile_only:
        compile_variants(args.forms, args.batches, *map(int, args.part.split("/")))
        return
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; variants of Llama-3-8B's linears, us")
    found = run_variants(args.forms, args.batches, args.processes, args.seconds)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def attend(args: argparse.Namespace) -> None:
    if args.compile_only:
        compile_part(*map(int, args.part.split("/")), args.variants)
        return
    found = compare(args.processes, args.variants, args.seconds)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def step_ms(layers: list, batch: int, device: torch.device, multiply: Callable[..., None]) -> float:
    """Milliseconds of 32 layers' linears."""
    launches = []
    for weights in layers:
        for (num_outputs, num_inputs), weight in zip(LAYER.values(), weights, strict=True):
            x = torch.randn(batch, num_inputs, device=device, dtype=torch.bfloat16)
            out = torch.empty(batch, num_outputs, device=device, dtype=torch.bfloat16)
            launches.append(lambda x=x, weight=weight, out=out: multiply(x, weight, out))
    return graph_us(launches) * len(LAYER) * NUM_LAYERS / 1e3


def check(packed: list[WordMatrix], device: torch.device) -> None:
    """Every way that a product takes, against decoded weights in float64."""
    for matrix in packed[:2]:
        ids = torch.arange(matrix.num_rows, device=device)
        weights = torch.empty((matrix.num_rows, matrix.num_columns), device=device)
        embedding_packed(ids, matrix, weights)
        for batch in CHECKED_ROWS:
            x = torch.randn(batch, matrix.num_columns, device=device, dtype=torch.bfloat16)
            out = torch.empty(batch, matrix.num_rows, device=device, dtype=torch.bfloat16)
            linear_packed(x, matrix, None, out)
            exact = x.double() @ weights.double().T
            error = float((out.double() - exact).norm() / exact.norm())
            assert error < 6e-3, f"{matrix.bits} bits, {batch} rows: relative error {error:.1e}"


def show(figures: dict[str, dict[int, float]]) -> None:
    batches = list(figures["bf16"])
    print("batch".ljust(12) + "".join(f"{batch:>10d}" for batch in batches))
    for form, times in figures.items():
        print(form.ljust(12) + "".join(f"{times[batch]:10.3f}" for batch in batches))
    for form, times in figures.items():
        ratios = (figures["bf16"][batch] / times[batch] for batch in batches)
        print(f"x {form}".ljust(12) + "".join(f"{ratio:10.2f}" for ratio in ratios))


def compile_all(forms: list[str], batches: list[int], index: int, count: int) -> None:
    """The kernels of every form, batch and shape, without running them; of each form's every count-th."""
    with compiling_only() as compiled:
        for text in forms:
            cases = [(sizes, batch) for batch in batches for sizes in (*LAYER.values(), HEAD)]
            for (num_outputs, num_inputs), batch in cases[index::count]:
                meta = meta_matrix(text, num_outputs, num_inputs)
                x = torch.empty((batch, num_inputs), dtype=torch.bfloat16, device="meta")
                out = torch.empty((batch, num_outputs), dtype=torch.bfloat16, device="meta")
                linear_packed(x, meta, None, out)
            num_inputs = HEAD[1]
            table = torch.empty((1, num_inputs), dtype=torch.bfloat16, device="meta")
            ids = torch.empty(1, dtype=torch.int64, device="meta")
            embedding_packed(ids, meta_matrix(text, *HEAD), table)
    print(f"{len(compiled)} launches compiled")


if __name__ == "__main__":
    main()
