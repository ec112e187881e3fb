"""Attention of decodes with a shared beginning, read once (cascade) and read by each request, a layer.

    python benchmarks/kernels/bench_cascade.py                      # the target's rows, with variants of the kernels
    python benchmarks/kernels/bench_cascade.py --grid --limit-s 110 --json g.json  # 200 points: batch x shared x own
    python benchmarks/kernels/bench_cascade.py --levels              # system prompt -> document -> conversation
    python benchmarks/kernels/bench_cascade.py --device cpu --heads 9 --kv-heads 3 --head-dim 64 --grid

"floor" is a layer's shared products at 788 TFLOP/s or the bytes of all distinct KV at 4.3 TB/s, whichever is longer.
On a GPU a figure is the median over CUDA graphs of several layers, each with its own cache, so that own KV comes from
memory.
"auto" is what the planner of ``cascade: auto`` decides before its cost model has seen anything: what it reads together
must not be slower than apart; what it leaves has a ratio of 1. The grid times both in turn, auto's points first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.attention.base import AttentionShape, create_backend
from headrace.attention.metadata import AttentionMetadata, PrefixGroup
from headrace.config import SharingConfig
from headrace.core.cascade import CascadePlanner
from headrace.core.cost_model import CostModel
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.engine.device_defaults import GPU_CASCADE_REQUESTS, cascade_floor

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
MAX_FAILURES = 3
LEAST_RATIO = 0.99


@dataclass
class Setup:
    """What is measured on."""

    shape: AttentionShape
    device: torch.device
    dtype: torch.dtype
    seconds: float
    kernels: str

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
        self.num_layers = layers
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

    def measure(self, changes: Sequence[Callable[[Any], None] | None]) -> list[Timing]:
        """Apart first, then together once for each change of the backend (None: as it is), all timed in turn."""
        shape, results = self.setup.shape, []
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
        attention = _op(self.setup.kernels)
        ways: list[list[Callable[[], None]]] = []
        for place, change in enumerate((None, *changes)):
            data = self.metadata
            if place == 0:
                data = AttentionMetadata(data.query_starts, data.context_lens, data.block_table, BLOCK)
            backend = create_backend(self.setup.kernels, shape, self.setup.device)
            if change is not None:
                change(backend)
            plan = backend.plan(data)

            def launch(layer: int, plan: Any = plan) -> None:
                attention(self.qkv, self.cache[:, layer, 0], self.cache[:, layer, 1], plan, self.out, *heads)

            ways.append(
                [lambda layer=layer, launch=launch: launch(layer) for layer in range(self.num_layers)]
            )
            ways[-1][-1]()
            results.append(self.out.float().clone())
        if self.setup.device.type == "cuda":
            from triton_timing import graphs_us

            times = graphs_us(ways, self.setup.seconds)
        else:
            times = [[_best_us(way[0], self.setup.seconds)] for way in ways]
        return [
            Timing(
                statistics.median(samples),
                statistics.median(a / b for a, b in zip(times[0], samples, strict=True)),
                float((out - results[0]).norm() / results[0].norm()),
            )
            for samples, out in zip(times, results, strict=True)
        ]


@dataclass
class Timing:
    """us: microseconds a layer.  gain: time apart over this.  error: relative, against the result apart."""

    us: float
    gain: float
    error: float


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


def run_points(
    setup: Setup,
    points: Sequence[tuple[int, int, int]],
    changes: dict[str, Callable[[Any], None] | None],
    limit_s: float,
) -> list[dict[str, Any]]:
    """Every point apart and together, with each change of the backend; a point that fails is told and left out."""
    records: list[dict[str, Any]] = []
    start, num_failures = time.monotonic(), 0
    print(
        f"{'batch x (shared + own)':26} {'variant':12} {'us':>8} {'apart us':>9} {'gain':>7} {'floor us':>9}  error"
    )
    for number, (batch, shared, own) in enumerate(points):
        if time.monotonic() - start > limit_s or num_failures >= MAX_FAILURES:
            print(f"stopped: {len(points) - number} of {len(points)} points were not measured", flush=True)
            break
        if (shared + batch * own) * setup.token_bytes > MAX_POINT_BYTES:
            continue
        try:
            point = Point(setup, batch, [(batch, shared)], own)
            apart, *together = point.measure(list(changes.values()))
        except Exception:  # a run of minutes is not lost to one point
            num_failures += 1
            print(f"{batch:4d} x ({shared:6d} + {own:5d})    failed: {traceback.format_exc()}", flush=True)
            continue
        is_on = decides(setup, batch, shared, own)
        for name, timing in zip(changes, together, strict=True):
            records.append(
                {
                    "batch": batch, "shared": shared, "own": own, "variant": name, "us": timing.us,
                    "apart_us": apart.us, "gain": timing.gain, "floor_us": point.floor_us, "error": timing.error,
                    "auto": is_on,
                }
            )  # fmt: skip
            print(
                f"{batch:4d} x ({shared:6d} + {own:5d})    {name:12} {timing.us:8.1f} {apart.us:9.1f} "
                f"{timing.gain:6.2f}x {point.floor_us:9.1f}  {timing.error:.1e}{'' if is_on else '  (auto: off)'}",
                flush=True,
            )
        del point
    print(f"{len(records)} lines in {time.monotonic() - start:.1f} s", flush=True)
    return records


def run_levels(setup: Setup) -> list[dict[str, Any]]:
    """256 conversations: one system prompt, 8 documents, 64 threads."""
    levels = [(256, 2048), (32, 4096), (4, 1024)]
    apart, together = Point(setup, 256, levels, 128).measure([None])
    print(
        f"three levels {levels} + 128: {together.us:.1f} us, apart {apart.us:.1f} us, {together.gain:.1f}x, "
        f"error {together.error:.1e}"
    )
    return [{"levels": levels, "us": together.us, "apart_us": apart.us, "error": together.error}]


def decides(setup: Setup, batch: int, shared: int, own: int) -> bool:
    """Whether ``cascade: auto`` reads a beginning of ``shared`` tokens together in a step of decodes."""
    specs = [KVCacheSpec("full", (0,), BLOCK * setup.token_bytes)]
    is_gpu = setup.device.type == "cuda"
    floor = cascade_floor("cuda" if is_gpu else "cpu", specs, BLOCK)
    sharing = SharingConfig(cascade_min_requests=GPU_CASCADE_REQUESTS if is_gpu else None)
    planner = CascadePlanner(sharing, BLOCK, CostModel(), floor)
    return planner._is_worthwhile(list(range(batch)), 0, shared // BLOCK, [shared + own - 1] * batch)


def summarize(records: list[dict[str, Any]]) -> None:
    """What auto gives over the grid."""
    taken = sorted((r for r in records if r["auto"]), key=lambda r: r["gain"])
    left = [r for r in records if not r["auto"]]
    slow = [r for r in taken if r["gain"] < LEAST_RATIO]
    gains = [r for r in left if r["gain"] > 1.05]
    wrong = [r for r in records if not r["error"] < 0.02]
    print(f"auto: {len(taken)} of {len(records)} points are read together, {len(left)} apart (ratio 1)")
    for title, chosen in (
        ("worst", taken[:3]),
        (f"{len(slow)} below {LEAST_RATIO}", slow),
        (f"{len(gains)} left that would gain over 5 %", gains),
        (f"{len(wrong)} with an error of 2 % or more", wrong),
    ):
        print(f"  {title}: " + ", ".join(_short(r) for r in chosen))


def _short(record: dict[str, Any]) -> str:
    return f"{record['batch']} x ({record['shared']} + {record['own']}) {record['gain']:.3f}x"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seconds", type=float, default=0.03, help="of timing, each way")
    parser.add_argument("--kernels", choices=["triton", "reference"], help="by the device if left out")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="take every so manieth point only")
    parser.add_argument("--most", type=int, help="leave points of more tokens, all requests together")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no point after so many seconds")
    parser.add_argument("--levels", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    is_gpu = device.type == "cuda"
    dtype = getattr(torch, args.dtype or ("bfloat16" if is_gpu else "float32"))
    kernels = args.kernels or ("triton" if is_gpu else "reference")
    shape = AttentionShape(args.heads, args.kv_heads, args.head_dim, is_half=dtype != torch.float32)
    setup = Setup(shape, device, dtype, args.seconds, kernels)
    if args.levels:
        records = run_levels(setup)
    else:
        points = sorted(GRID, key=lambda point: not decides(setup, *point)) if args.grid else TARGETS
        points = [p for p in points if not args.most or p[1] + p[0] * p[2] <= args.most][:: args.every]
        changes = {"default": None} if args.grid else variants(setup)
        records = run_points(setup, points, changes, args.limit_s)
        if args.grid:
            summarize(records)
    if args.json:
        args.json.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
