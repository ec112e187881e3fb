"""Attention of many decodes by mean context, for each shape of launch, on one GPU.

Contexts are exponentially distributed around each mean, as those of chats are; rows of other steps follow, for a shape
that suits short contexts may cost elsewhere. Microseconds of one layer; the best of a row has a star. The last table
has the times by mean context, as a share of those of the first shape. ``MANY_UNITS`` is set from both.

    PYTHONPATH=. python benchmarks/kernels/bench_short_contexts.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import numpy as np
import torch
from triton_cases import COLD_BYTES, LLAMA, QWEN, Model, attention_error, attention_launches, paged_cache
from triton_timing import MEMORY_BYTES_PER_S, graphs_us

from headrace.kernels.triton.attention_tiles import LaunchShape

SHAPES = (
    LaunchShape(16, 64, 2, 4, 4),
    LaunchShape(16, 32, 2, 2, 16, num_resident=8),
    LaunchShape(16, 64, 2, 4, 8, num_resident=4),
    LaunchShape(16, 32, 2, 2, 8),
    LaunchShape(16, 32, 3, 2, 8),
    LaunchShape(16, 32, 3, 2, 6),
    LaunchShape(16, 64, 2, 2, 5),
)
"""The engine's for heads of 128 numbers first: of few units of work and of many. Of the fifth only six programs fit
into a multiprocessor's memory; the sixth is the same with those only."""

REQUESTS, MEANS = (128, 256, 384, 448), (100, 200, 300, 400, 600)
MAX_ERROR = 1e-2

Row = dict[LaunchShape, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("llama", "qwen"), default="llama")
    parser.add_argument("--requests", type=int, nargs="*", default=REQUESTS)
    parser.add_argument("--means", type=int, nargs="*", default=MEANS)
    args = parser.parse_args()
    model = {"llama": LLAMA, "qwen": QWEN}[args.model]
    print(f"{torch.cuda.get_device_name()}, {model.name}; us a layer")
    print(f"{'':24}{'limit':>7}" + "".join(f"{_text(shape):>18}" for shape in SHAPES))
    by_mean: dict[int, list[Row]] = {}
    for mean in args.means:
        for count in args.requests:
            contexts = exponential(count, mean)
            row = measure(model, [1] * count, contexts)
            by_mean.setdefault(mean, []).append(row)
            print_row(f"{count} of about {mean}", model, contexts, row)
    for name, (queries, contexts) in other_steps().items():
        print_row(name, model, contexts, measure(model, queries, contexts))
    print(f"{'of the first, by mean':31}" + "".join(f"{_text(shape):>18}" for shape in SHAPES))
    for mean, rows in by_mean.items():
        print(f"{mean:<31}" + "".join(f"{_shares(rows, shape):>18}" for shape in SHAPES))


def exponential(count: int, mean: int) -> list[int]:
    """Lengths of contexts."""
    lengths = np.random.default_rng(0).exponential(mean - 10, count) + 10
    return np.clip(lengths, 1, 16 * mean).astype(int).tolist()


def other_steps() -> dict[str, tuple[list[int], list[int]]]:
    """{name: (query lengths, context lengths)}"""
    chats = exponential(370, 200)
    long = np.random.default_rng(1).integers(150, 1600, 400).tolist()
    return {
        "370 of 200, 142 of prompts": ([1] * 370 + [80, 62], [*chats, 80, 62]),
        "400 of 150 to 1600": ([1] * 400, long),
        "448 of 600 each": ([1] * 448, [600] * 448),
        "64 of 1100 each": ([1] * 64, [1100] * 64),
        "8 of 1024 each": ([1] * 8, [1024] * 8),
    }


def measure(model: Model, queries: Sequence[int], contexts: Sequence[int]) -> Row:
    """Microseconds of a layer by shape; all take turns over the same cache.

    Raises:
        AssertionError: a result is wrong.
    """
    shape, device = model.shape, torch.device("cuda")
    layers = max(2, min(32, -(-COLD_BYTES // _read_bytes(model, contexts))))
    metadata, cache = paged_cache(shape, queries, contexts, layers, device)
    launches = []
    for short in SHAPES:
        way, qkv, out = attention_launches(model, metadata, cache, short=short)
        way[-1]()
        error = attention_error(shape, metadata, qkv, cache[:, layers - 1], out, shape.head_dim**-0.5)
        assert error <= MAX_ERROR, f"{short}: an error of {error}"
        launches.append(way)
    samples = graphs_us(launches, seconds=0.02)
    return {short: statistics.median(found) for short, found in zip(SHAPES, samples, strict=True)}


def print_row(name: str, model: Model, contexts: Sequence[int], row: Row) -> None:
    """One step's figures."""
    best = min(row.values())
    cells = [f"{f'{row[shape]:.1f}' + '*' * (row[shape] == best):>18}" for shape in SHAPES]
    limit_us = 1e6 * _read_bytes(model, contexts) / MEMORY_BYTES_PER_S
    print(f"{name:26}{limit_us:5.0f}" + "".join(cells), flush=True)


def _shares(rows: Sequence[Row], shape: LaunchShape) -> str:
    """Over steps of all sizes."""
    return f"{statistics.geometric_mean(row[shape] / row[SHAPES[0]] for row in rows):.2f}"


def _read_bytes(model: Model, contexts: Sequence[int]) -> int:
    return sum(contexts) * 4 * model.shape.num_kv_heads * model.shape.head_dim


def _text(shape: LaunchShape) -> str:
    numbers = (shape.block_m, shape.block_n, shape.num_stages, shape.num_warps)
    return ",".join(map(str, (*numbers, shape.programs_per_multiprocessor)))


if __name__ == "__main__":
    main()
