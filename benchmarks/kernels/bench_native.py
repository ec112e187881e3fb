"""The native CPU kernels beside the reference ops, on the shapes of SmolLM2-135M (or of another small model).

    OMP_NUM_THREADS=2 python benchmarks/kernels/bench_native.py [FILTER] [--threads 2] [--cpu-time] [--no-reference]

One line a kernel: microseconds of both, their ratio, and what the native one reaches in GB/s and GFLOP/s. Weights and
caches are cycled through copies that together do not fit into the caches, as in a model. With --cpu-time the time
counted is this process's own, for a machine that others use; with it, measure one thread.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.native import NativeBackend
from headrace.kernels.native import sampling
from headrace.kernels.reference import sampling as plain
from headrace.kernels.registry import Ops
from headrace.runtime.kv_cache import KVCacheLayout

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 576, 1536, 9, 3, 64, 49152
LINEARS = {
    "qkv": (960, 576),
    "out": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
COLD_BYTES = 96 << 20
SECONDS = 0.1
REPEAT = 3


@dataclass
class Case:
    """One kernel on one shape. num_bytes, num_flops: what one call must move and compute."""

    name: str
    native: Callable[[], None]
    reference: Callable[[], None] | None
    num_bytes: float
    num_flops: float = 0.0


def in_turn(functions: list[Callable[[], None]]) -> Callable[[], None]:
    """Calls one after the other, one a call."""
    cycle = itertools.cycle(functions)
    return lambda: next(cycle)()


def copies_of(num_bytes: int) -> int:
    return max(1, min(64, COLD_BYTES // num_bytes))


def linear_cases(native: Ops, reference: Ops) -> Iterator[Case]:
    for name, (outputs, inputs) in LINEARS.items():
        weight = torch.randn(outputs, inputs)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            size = outputs * inputs * dtype.itemsize
            packed = [native.pack_weight(weight.to(dtype)) for _ in range(copies_of(size))]
            plain = [reference.pack_weight(weight) for _ in range(copies_of(outputs * inputs * 4))]
            for rows in (1, 2, 4, 8, 16, 32, 128, 512):
                if rows * outputs > 4_000_000:
                    continue
                x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
                yield Case(
                    f"linear {name} {str(dtype)[6:]} x{rows}",
                    in_turn([partial(native.linear, x, w, None, out) for w in packed]),
                    in_turn([partial(reference.linear, x, w, None, out) for w in plain]),
                    size,
                    2.0 * rows * outputs * inputs,
                )


STEPS = {
    "decode 1x1k": ([1], [1024]),
    "decode 1x8k": ([1], [8192]),
    "decode 32x150": ([1] * 32, [150] * 32),
    "decode 32x1k": ([1] * 32, [1024] * 32),
    "prefill 512": ([512], [512]),
    "prefill 512 of 4k": ([512], [4096]),
    "mixed 16+256": ([1] * 16 + [256], [200] * 16 + [256]),
}


def attention_cases(native: Ops, reference: Ops) -> Iterator[Case]:
    shape = AttentionShape(HEADS, KV_HEADS, DIM)
    for name, (queries, contexts) in STEPS.items():
        for dtype in (torch.float32, torch.bfloat16):
            num_blocks = sum(-(-length // 16) for length in contexts)
            layout = KVCacheLayout(1, KV_HEADS, 16, DIM, dtype)
            copies = copies_of(num_blocks * layout.bytes_per_block)
            caches = [torch.randn(num_blocks, 2, KV_HEADS, 16, DIM).to(dtype) for _ in range(copies)]
            table = torch.full((len(contexts), max(contexts) // 16 + 1), -1, dtype=torch.int32)
            ids = torch.randperm(num_blocks, dtype=torch.int32)
            start = 0
            for row, length in enumerate(contexts):
                count = -(-length // 16)
                table[row, :count] = ids[start : start + count]
                start += count
            metadata = AttentionMetadata(
                np.concatenate(([0], np.cumsum(queries))).astype(np.int32),
                np.array(contexts, np.int32),
                table,
                16,
            )
            plan = NativeBackend(shape, torch.device("cpu")).plan(metadata)
            qkv = torch.randn(sum(queries), (HEADS + 2 * KV_HEADS) * DIM)
            out = torch.empty(sum(queries), HEADS * DIM)
            pairs = sum(q * (c - q) + q * (q + 1) / 2 for q, c in zip(queries, contexts, strict=True))

            rest = (plan, out, HEADS, KV_HEADS, DIM, DIM**-0.5)
            own, plain = (
                [partial(ops.attention, qkv, cache[:, 0], cache[:, 1], *rest) for cache in caches]
                for ops in (native, reference)
            )
            yield Case(
                f"attention {name} {str(dtype)[6:]}",
                in_turn(own),
                in_turn(plain),
                num_blocks * layout.bytes_per_block,
                4.0 * pairs * HEADS * DIM,
            )


def small_cases(native: Ops, reference: Ops) -> Iterator[Case]:
    table = torch.randn(VOCAB, HIDDEN)
    packed = native.pack_weight(table)
    for rows in (1, 32, 512):
        x, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
        out, norm = torch.empty(rows, HIDDEN), torch.ones(HIDDEN)
        gate_up, inner = torch.randn(rows, 2 * INNER), torch.empty(rows, INNER)
        qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM)
        cache = torch.randn(64, 2, KV_HEADS, 16, DIM)
        index, slots = torch.arange(rows), torch.randperm(64 * 16)[:rows]
        ids = torch.randint(0, VOCAB, (rows,))
        yield Case(
            f"embedding packed x{rows}",
            partial(native.embedding, ids, packed, out),
            partial(reference.embedding, ids, table, out),
            8.0 * rows * HIDDEN,
        )
        rope = (qkv, None, None, 1e-5, torch.rand(2048, DIM), index, slots, cache[:, 0], cache[:, 1])
        calls: dict[str, tuple[tuple[Any, ...], float]] = {
            "rms_norm": ((x, norm, 1e-5, out), 8.0 * x.numel()),
            "add_rms_norm": ((x, residual, norm, 1e-5, out), 16.0 * x.numel()),
            "gated_act": ((gate_up, "silu", inner), 12.0 * inner.numel()),
            "rope_and_store": ((*rope, HEADS, KV_HEADS, DIM), 12.0 * qkv.numel()),
            "gather_rows": ((x, index, out), 8.0 * x.numel()),
            "soft_cap": ((gate_up, 50.0), 8.0 * gate_up.numel()),
        }
        for name, (arguments, num_bytes) in calls.items():
            own, plain = (partial(getattr(ops, name), *arguments) for ops in (native, reference))
            yield Case(f"{name} x{rows}", own, plain, num_bytes)


def argmax_cases(native: Ops, reference: Ops) -> Iterator[Case]:
    for rows in (1, 32):
        logits = torch.randn(rows, VOCAB)
        yield Case(
            f"row_argmax x{rows}",
            partial(sampling.row_argmax, logits),
            partial(plain.row_argmax, logits),
            4.0 * logits.numel(),
        )


def copy_cases(native: Ops, reference: Ops) -> Iterator[Case]:
    layout = KVCacheLayout(30, KV_HEADS, 16, DIM, torch.float32)
    blocks = torch.zeros(64, layout.bytes_per_block, dtype=torch.uint8)
    src, dst = torch.arange(16), torch.arange(32, 48)
    count = torch.full((16,), 9)
    yield Case(
        "copy_blocks 16x9 tokens",
        lambda: native.copy_blocks(blocks, src, dst, count, layout),
        lambda: reference.copy_blocks(blocks, src, dst, count, layout),
        2.0 * 16 * 9 * layout.num_planes * layout.token_bytes,
    )


def microseconds(function: Callable[[], None], clock: Callable[[], float]) -> float:
    function()
    found = []
    for _ in range(REPEAT):
        start, calls = clock(), 0
        while calls < 3 or clock() - start < SECONDS:
            function()
            calls += 1
        found.append((clock() - start) / calls * 1e6)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("filter", nargs="?", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--no-reference", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    native, reference = Ops.for_device("cpu", "native"), Ops.for_device("cpu", "reference")
    print(f"{'kernel':<38}{'native us':>11}{'reference':>11}{'ratio':>7}{'GB/s':>7}{'GFLOP/s':>9}")
    groups = {
        "linear": linear_cases,
        "attention": attention_cases,
        "small": small_cases,
        "row_argmax": argmax_cases,
    }
    groups["copy_blocks"] = copy_cases
    chosen = [make for name, make in groups.items() if args.filter.startswith(name)] or list(groups.values())
    for cases in chosen:
        for case in cases(native, reference):
            if args.filter not in case.name:
                continue
            ours = microseconds(case.native, clock)
            theirs = microseconds(case.reference, clock) if case.reference and not args.no_reference else 0.0
            speed = f"{case.num_bytes / ours / 1e3:>7.1f}{case.num_flops / ours / 1e3:>9.1f}"
            print(f"{case.name:<38}{ours:>11.1f}{theirs:>11.1f}{theirs / ours:>7.2f}{speed}", flush=True)


if __name__ == "__main__":
    main()
