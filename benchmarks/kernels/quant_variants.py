"""Tiles of ``linear_packed`` to choose from: every linear of Llama-3-8B by batch, each variant checked and timed.

Kernels are compiled first, in processes that need no GPU. Run by ``bench_quant.py --variants``.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from triton_timing import MEMORY_BYTES_PER_S, compiling_only, graph_us

from headrace.kernels.triton.linear import linear
from headrace.kernels.triton.linear_packed import Shape, chunk_sizes, linear_packed, pack_matrix, packed_shape
from headrace.kernels.triton.model_widths import PackedForm
from headrace.kernels.triton.packed_shapes import (
    DecodedShape,
    PackedPairShape,
    PackedRowShape,
    PackedTileShape,
    PackedWgmmaShape,
    wgmma_splits,
    wgmma_stages,
)
from headrace.kernels.triton.packed_warmup import empty_matrix
from headrace.kernels.triton.word_matrix import WordMatrix
from headrace.quant.precision import Rounding, parse_form
from headrace.quant.rounding import round_weights

LAYER = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
NUM_LAYERS = 32
_COLD_BYTES = 160 << 20
_MAX_ERROR = 6e-3

ROW_SHAPES = [(8, 128, 1), (4, 128, 1), (4, 256, 2), (8, 256, 2), (4, 512, 4), (2, 512, 4), (8, 512, 4)]
# {rows of x: (block_t, block_n, warps, programs that share a multiprocessor)}
WGMMA_SHAPES = {
    2: [(16, 64, 4, 4), (16, 64, 4, 3), (16, 128, 8, 2)],
    8: [(16, 64, 4, 4), (16, 64, 4, 3), (16, 128, 8, 2)],
    16: [(16, 64, 4, 4), (16, 64, 4, 3), (16, 128, 8, 2)],
    32: [(32, 64, 4, 4), (32, 128, 8, 2), (32, 128, 4, 2)],
    64: [(64, 128, 4, 2)],
}
# {rows of x: (block_t, block_n)}
PAIR_SHAPES = {
    64: [(64, 128), (64, 256)],
    128: [(128, 128), (128, 256)],
    256: [(128, 128), (256, 128)],
    512: [(256, 128)],
    1024: [(256, 128)],
}
VARIANT_BATCHES = sorted({1, *WGMMA_SHAPES, *PAIR_SHAPES})
_PIECES_MIB = (64,)


def shapes_of(batch: int, matrix: WordMatrix) -> list[Shape]:
    """All variants of a product."""
    shapes: list[Shape] = []
    if batch == 1:
        shapes += [PackedRowShape(*numbers) for numbers in ROW_SHAPES]
    for block_t, block_n, warps, resident in WGMMA_SHAPES.get(batch, ()):
        splits = wgmma_splits(-(-matrix.num_rows // block_n), matrix.codes.shape[1], resident)
        stages = wgmma_stages(block_t, block_n, *chunk_sizes(matrix), resident)
        shape = PackedWgmmaShape(block_t, block_n, stages, warps, splits)
        if shape not in shapes:
            shapes.append(shape)
    for block_t, block_n in PAIR_SHAPES.get(batch, ()):
        tiles = -(-matrix.num_rows // block_n) * -(-batch // block_t)
        splits = wgmma_splits(tiles, matrix.codes.shape[1], 1)
        stages = wgmma_stages(block_t, block_n, *chunk_sizes(matrix), 1)
        shapes.append(PackedPairShape(block_t, block_n, stages, splits))
    if batch >= 256:
        shapes += [DecodedShape(size << 20) for size in _PIECES_MIB]
    return shapes


def compile_variants(forms: Sequence[str], batches: Sequence[int], index: int, count: int) -> None:
    """Fill Triton's cache on disk with every count-th variant, without a GPU."""
    cases = [
        (form, name, batch, shape)
        for form in forms
        for name in LAYER
        for batch in batches
        for shape in shapes_of(batch, _meta(form, name))
    ]
    with compiling_only():
        for form, name, batch, shape in cases[index::count]:
            matrix, (num_outputs, num_inputs) = _meta(form, name), LAYER[name]
            x = torch.empty((batch, num_inputs), dtype=torch.bfloat16, device="meta")
            out = torch.empty((batch, num_outputs), dtype=torch.bfloat16, device="meta")
            try:
                linear_packed(x, matrix, None, out, shape=shape)
            except Exception as error:  # found again, and reported, when it is measured
                print(f"DOES NOT COMPILE {form} {name} {batch} {text_of(shape)}: {str(error)[-300:]}")


_metas: dict[tuple[str, str], WordMatrix] = {}


def _meta(form: str, name: str) -> WordMatrix:
    """A matrix without memory."""
    if (form, name) not in _metas:
        num_outputs, num_inputs = LAYER[name]
        _metas[form, name] = meta_matrix(form, num_outputs, num_inputs)
    return _metas[form, name]


def meta_matrix(form: str, num_outputs: int, num_inputs: int) -> WordMatrix:
    """A matrix without memory, of a form's layout."""
    rounding = _rounding(form)
    kept = PackedForm(rounding.bits, rounding.group_columns, rounding.has_zero_points)
    return empty_matrix(kept, (num_outputs, num_inputs), torch.device("meta"))


def run_variants(forms: Sequence[str], batches: Sequence[int], processes: int, seconds: float) -> dict:
    """{form: {batch: {linear: {variant: us}}}}; compiles first, and begins no measurement after ``seconds``."""
    start = time.perf_counter()
    options = ["--variants", "--forms", *forms, "--batches", *map(str, batches)]
    compile_in_processes(options, processes)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    deadline, device = start + seconds, torch.device("cuda")
    found: dict = {form: {batch: {} for batch in batches} for form in ("bf16", *forms)}
    for name, sizes in LAYER.items():
        weight = torch.randn(sizes, device=device, dtype=torch.bfloat16)
        copies = _copies(2 * weight.numel())
        weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        for batch in batches:
            x, out = _vectors(batch, sizes, device)
            launches = [partial(linear, x, copy, None, out) for copy in weights]
            found["bf16"][batch][name] = {"linear": graph_us(launches, 0.02, 3)}
        del weights
        for form in forms:
            for batch, times in _measure(form, weight, batches, deadline):
                found[form][batch][name] = times
                _show_linear(found, form, batch, name)
    _show(found, forms, batches)
    print(f"{time.perf_counter() - start:.0f} s in all")
    return found


def compile_in_processes(options: Sequence[str], processes: int) -> None:
    """``bench_quant.py --compile-only`` with these options, divided among processes."""
    script = str(Path(__file__).with_name("bench_quant.py"))
    command = [sys.executable, script, *options, "--compile-only", "--part"]
    children = [subprocess.Popen([*command, f"{index}/{processes}"]) for index in range(processes)]
    for child in children:
        child.wait()


def _measure(
    form: str, weight: torch.Tensor, batches: Sequence[int], deadline: float
) -> Iterator[tuple[int, dict[str, float]]]:
    """(batch, {variant: us}) of one linear."""
    affine = round_weights(weight, _rounding(form))
    matrix, exact_weight = pack_matrix(affine), affine.dequantize()
    matrices = [matrix, *(copy_of(matrix) for _ in range(_copies(matrix.num_bytes) - 1))]
    for batch in batches:
        x, out = _vectors(batch, tuple(weight.shape), weight.device)
        exact = x.double() @ exact_weight.double().T
        times: dict[str, float] = {}
        for shape in shapes_of(batch, matrix):
            if time.perf_counter() > deadline:
                break
            variant = text_of(shape) + ("*" if shape == packed_shape(batch, matrix, torch.bfloat16) else "")
            try:
                out.fill_(torch.nan)
                linear_packed(x, matrix, None, out, shape=shape)
                error = float((out.double() - exact).norm() / exact.norm())
                if not error < _MAX_ERROR:
                    print(
                        f"WRONG {form} {tuple(weight.shape)} T={batch} {variant}: relative error {error:.1e}"
                    )
                    continue
                launches = [partial(linear_packed, x, copy, None, out, shape=shape) for copy in matrices]
                times[variant] = graph_us(launches, 0.02, 3)
            except Exception as failure:
                print(f"FAILED {form} {tuple(weight.shape)} T={batch} {variant}: {str(failure)[:200]}")
                traceback.print_exc(limit=1)
                if "illegal" in str(failure) or "CUDA error" in str(failure):
                    raise
        yield batch, times


def copy_of(matrix: WordMatrix) -> WordMatrix:
    """The same in other memory."""
    minimums = None if matrix.minimums is None else matrix.minimums.clone()
    shape = (matrix.num_rows, matrix.num_columns)
    codes, scales = matrix.codes.clone(), matrix.scales.clone()
    return WordMatrix(*shape, matrix.bits, matrix.group_columns, codes, scales, minimums)


def text_of(shape: Shape) -> str:
    """A variant in a few letters."""
    numbers = [int(getattr(shape, name)) for name in shape.__slots__]
    if isinstance(shape, DecodedShape):
        numbers = [shape.num_bytes >> 20]
    kind = {
        PackedRowShape: "row",
        PackedTileShape: "tile",
        PackedWgmmaShape: "wgmma",
        PackedPairShape: "pair",
        DecodedShape: "decoded",
    }[type(shape)]
    return f"{kind}({','.join(map(str, numbers))})"


def _rounding(form: str) -> Rounding:
    rounding = parse_form(form)
    assert isinstance(rounding, Rounding), form
    return rounding


def _copies(num_bytes: int) -> int:
    return max(2, -(-_COLD_BYTES // num_bytes))


def _vectors(batch: int, sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(batch, sizes[1], device=device, dtype=torch.bfloat16)
    return x, torch.empty(batch, sizes[0], device=device, dtype=torch.bfloat16)


def _show_linear(found: dict, form: str, batch: int, name: str) -> None:
    """Variants of a linear, the best first."""
    best = sorted(found[form][batch][name].items(), key=lambda item: item[1])
    plain = found["bf16"][batch][name]["linear"]
    line = "; ".join(f"{variant} {us:.1f}" for variant, us in best)
    print(f"{form} T={batch} {name}, bf16 {plain:.1f}: {line}", flush=True)


def _show(found: dict, forms: Sequence[str], batches: Sequence[int]) -> None:
    """The sums of a step."""
    for form in forms:
        num_bytes = NUM_LAYERS * sum(_meta(form, name).num_bytes for name in LAYER)
        print(f"{form}: limit by bandwidth {1e3 * num_bytes / MEMORY_BYTES_PER_S:.2f} ms a step")
        for batch in batches:
            best_us = sum(min(times.values(), default=float("nan")) for times in found[form][batch].values())
            plain_us = sum(times["linear"] for times in found["bf16"][batch].values())
            best_ms, plain_ms = best_us * NUM_LAYERS / 1e3, plain_us * NUM_LAYERS / 1e3
            print(f"step {form} T={batch}: {best_ms:.3f} ms, bf16 {plain_ms:.3f}, {plain_ms / best_ms:.2f}x")
