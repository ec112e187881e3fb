"""Attention of decodes with a shared beginning, read once (cascade) and read by each request, a layer.

    python benchmarks/kernels/bench_cascade.py                      # the target's rows, with variants of the kernels
    python benchmarks/kernels/bench_cascade.py --grid --json g.json  # 200 points: batch x shared x own
    python benchmarks/kernels/bench_cascade.py --levels              # system prompt -> document -> conversation
    python benchmarks/kernels/bench_cascade.py --device cpu --heads 9 --kv-heads 3 --head-dim 64 --grid

"floor" is a layer's shared products at 788 TFLOP/s or the bytes of all distinct KV at 4.3 TB/s, whichever is longer.
On a GPU a figure is the median over CUDA graphs of several layers, each with its own cache, so that own KV comes from
memory.
"auto" is what ``cascade: auto`` takes before it has measured anything: on from 256 tokens, 8 requests, 10 % of the
context and 8,192 tokens that need not be read again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.attention.base import AttentionShape, create_backend
from headrace.attention.metadata import AttentionMetadata, PrefixGroup
from headrace.config import SharingConfig
from headrace.core.cascade import MIN_SAVED_TOKENS

BLOCK = 16
TARGETS = [
    (256, 8192, 64),
    (256, 8192, 128),
    (256, 8192, 192),
    (256, 32768, 64),
    (128, 32768, 64),
    (64, 2048, 256),
]
GRID = list(
    itertools.product(
        (2, 4, 8, 16, 32, 64, 128, 256), (256, 1024, 4096, 8192, 32768), (16, 64, 256, 1024, 4096)
    )
)
MAX_POINT_BYTES = 24 << 30


@dataclass
class Setup:
    """What is measured on."""

    shape: AttentionShape
    device: torch.device
    dtype: torch.dtype
    seconds: float

    @property
    def token_bytes(self) -> int:
        """KV of one token in one layer."""
        return 2 * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize


class Point:
    """A step of decodes over a cache whose tables share their first blocks; levels: (requests a group, tokens)."""

    def __init__(self, setup: Setup, batch: int, levels: Sequence[tuple[int, int]], own: int) -> None:
        self.setup = setup
        shape, device = setup.shape, setup.device
        spans, table, first, num_blocks = [], np.empty((batch, 0), np.int64), 0, 0
        for size, tokens in [*levels, (1, own)]:
            count, groups = -(-tokens // BLOCK), -(-batch // size)
            ids = num_blocks + np.arange(groups * count).reshape(groups, count)
            table = np.concatenate((table, ids.repeat(size, 0)[:batch]), 1)
            if size > 1:
                members = np.array_split(np.arange(batch), groups)
                spans += [PrefixGroup(part, first + count, first) for part in members]
            first, num_blocks = first + count, num_blocks + groups * count
        bytes_a_layer = num_blocks * BLOCK * setup.token_bytes
        layers = max(1, min(8, (400 << 20) // bytes_a_layer)) if device.type == "cuda" else 1
        layout = (num_blocks, layers, 2, shape.num_kv_heads, BLOCK, shape.head_dim)
        self.cache = torch.empty(layout, dtype=setup.dtype, device=device).normal_()
        rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = torch.randn(batch, rows, device=device).to(setup.dtype)
        self.out = torch.empty(batch, shape.num_heads * shape.head_dim, dtype=setup.dtype, device=device)
        contexts = np.full(batch, sum(tokens for _, tokens in levels) + own, np.int32)
        block_table = torch.from_numpy(table.astype(np.int32)).to(device)
        starts = np.arange(batch + 1, dtype=np.int32)
        self.metadata = AttentionMetadata(starts, contexts, block_table, BLOCK, None, tuple(spans))
        shared = sum(tokens for _, tokens in levels)
        flops = 4 * batch * shared * shape.num_heads * shape.head_dim
        self.floor_us = 1e6 * max(bytes_a_layer / 4.3e12, flops / 788e12)
        self.floor_apart_us = 1e6 * batch * (shared + own) * setup.token_bytes / 4.3e12

    def measure(
        self, is_shared: bool, change: Callable[[Any], None] | None = None
    ) -> tuple[float, torch.Tensor]:
        """(microseconds a layer, the output of the last)."""
        setup, data = self.setup, self.metadata
        if not is_shared:
            data = AttentionMetadata(data.query_starts, data.context_lens, data.block_table, BLOCK)
        name = "triton" if setup.device.type == "cuda" else "reference"
        backend = create_backend(name, setup.shape, setup.device)
        if change is not None:
            change(backend)
        plan = backend.plan(data)
        shape = setup.shape
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
        attention = _op(name)

        def launch(layer: int) -> None:
            attention(self.qkv, self.cache[:, layer, 0], self.cache[:, layer, 1], plan, self.out, *heads)

        launches = [lambda layer=layer: launch(layer) for layer in range(self.cache.shape[1])]
        if setup.device.type == "cuda":
            from triton_timing import graph_us

            microseconds = graph_us(launches, setup.seconds)
        else:
            microseconds = _best_us(launches[0], setup.seconds)
        return microseconds, self.out.float().clone()


def _op(name: str) -> Callable[..., None]:
    if name == "triton":
        from headrace.kernels.triton.attention import attention as triton_attention

        return triton_attention
    from headrace.kernels.reference.attention import attention

    return attention


def _best_us(action: Callable[[], None], seconds: float) -> float:
    action()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best


def variants(setup: Setup) -> dict[str, Callable[[Any], None] | None]:
    """Ways to cut and launch the shared span on a GPU."""
    found: dict[str, Callable[[Any], None] | None] = {"default": None}
    if setup.device.type == "cuda":
        from headrace.attention.triton_work_list import SplitRule

        for units in (132, 264, 528):
            rule = SplitRule(setup.shape.num_kv_heads, num_units=units)
            found[f"units {units}"] = lambda backend, rule=rule: setattr(backend, "_split", rule)
    return found


def run_targets(setup: Setup, points: Sequence[tuple[int, int, int]], is_grid: bool) -> list[dict[str, Any]]:
    """Every point with and without cascade; the target's rows with all variants."""
    records = []
    print(
        f"{'batch x (shared + own)':26} {'variant':12} {'us':>8} {'apart us':>9} {'gain':>7} {'floor us':>9}  error"
    )
    for batch, shared, own in points:
        distinct = (shared + batch * own) * setup.token_bytes
        if distinct > MAX_POINT_BYTES:
            continue
        point = Point(setup, batch, [(batch, shared)], own)
        apart_us, expected = point.measure(False)
        for name, change in (variants(setup) if not is_grid else {"default": None}).items():
            us, out = point.measure(True, change)
            error = float((out - expected).norm() / expected.norm())
            is_on = _is_on(batch, shared, own)
            records.append(
                {
                    "batch": batch, "shared": shared, "own": own, "variant": name, "us": us, "apart_us": apart_us,
                    "floor_us": point.floor_us, "error": error, "auto": is_on,
                }
            )  # fmt: skip
            print(
                f"{batch:4d} x ({shared:6d} + {own:5d})    {name:12} {us:8.1f} {apart_us:9.1f} {apart_us / us:6.2f}x "
                f"{point.floor_us:9.1f}  {error:.1e}{'' if is_on else '  (auto: off)'}",
                flush=True,
            )
        del point
    return records


def run_levels(setup: Setup) -> list[dict[str, Any]]:
    """256 conversations: one system prompt, 8 documents, 64 threads."""
    levels = [(256, 2048), (32, 4096), (4, 1024)]
    point = Point(setup, 256, levels, 128)
    apart_us, expected = point.measure(False)
    us, out = point.measure(True)
    error = float((out - expected).norm() / expected.norm())
    print(
        f"three levels {levels} + 128: {us:.1f} us, apart {apart_us:.1f} us, {apart_us / us:.1f}x, error {error:.1e}"
    )
    return [{"levels": levels, "us": us, "apart_us": apart_us, "error": error}]


def _is_on(batch: int, shared: int, own: int) -> bool:
    floor = SharingConfig()
    if shared < floor.cascade_min_tokens or batch < floor.cascade_min_requests:
        return False
    return shared >= floor.cascade_min_share * (shared + own) and shared * (batch - 1) >= MIN_SAVED_TOKENS


def summarize(records: list[dict[str, Any]]) -> None:
    """What auto would give over the grid."""
    ratios = [(r["apart_us"] / r["us"] if r["auto"] else 1.0, r) for r in records]
    worst, where = min(ratios, key=lambda pair: pair[0])
    lost = [r for ratio, r in ratios if ratio < 0.99]
    missed = [r for r in records if not r["auto"] and r["apart_us"] / r["us"] > 1.05]
    print(f"auto over {len(records)} points: worst {worst:.3f}x, at", where)
    print(f"  {len(lost)} points below 0.99x; {len(missed)} points left off that would gain more than 5 %")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seconds", type=float, default=0.03)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--levels", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    setup = Setup(AttentionShape(args.heads, args.kv_heads, args.head_dim), device, dtype, args.seconds)
    if args.levels:
        records = run_levels(setup)
    else:
        records = run_targets(setup, GRID if args.grid else TARGETS, args.grid)
        if args.grid:
            summarize(records)
    if args.json:
        args.json.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
