"""Time of the attention op a layer, and of planning a step, for decode and prefill shapes.

Every layer of the model has its own slice of the cache and the layers are run in turn, as in a forward pass, so
nothing is measured on a cache-hot copy; a figure is the mean of each layer's fastest run. "GB/s" counts K and V of
the visible context once; "GF/s" counts the products that causal attention needs. "first extra" is what the op spends
once a step on top (indices, masks).

    OMP_NUM_THREADS=2 python benchmarks/kernels/bench_attention.py --backend reference
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from headrace.attention.base import AttentionShape, create_backend
from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.kernels.reference.attention import attention as reference_attention
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for

OPS: dict[str, Callable[..., None]] = {"reference": reference_attention}


@dataclass
class Step:
    """Tensors of one step over all layers."""

    metadata: AttentionMetadata
    qkv: torch.Tensor
    cache: KVCache
    out: torch.Tensor


def make_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    shape: AttentionShape,
    layers: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Step:
    owned = [-(-length // block_size) for length in context_lens]
    specs = kv_cache_specs_for([None] * layers, shape.num_kv_heads, shape.head_dim, block_size, dtype)
    layout = KVCacheLayout.for_specs(specs, shape.num_kv_heads, shape.head_dim, block_size, dtype)
    cache = KVCache(specs, layout, sum(owned), device)
    cache.blocks.view(dtype).normal_()
    ids = torch.randperm(sum(owned), dtype=torch.int32)
    table = torch.full((len(owned), max(owned)), -1, dtype=torch.int32)
    for row, count in enumerate(owned):
        table[row, :count], ids = ids[:count], ids[count:]
    width = shape.num_heads * shape.head_dim
    metadata = AttentionMetadata(
        query_starts=np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
        context_lens=np.array(context_lens, dtype=np.int32),
        block_table=table.to(device),
        block_size=block_size,
    )
    tokens = sum(query_lens)
    qkv = torch.randn(tokens, width + 2 * shape.num_kv_heads * shape.head_dim, device=device).to(dtype)
    return Step(metadata, qkv, cache, torch.empty(tokens, width, dtype=dtype, device=device))


def best_seconds(action: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The fastest of the runs that fit into ``seconds``: other work on the machine only ever adds."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


class LayerTimer:
    """Runs the op over the layers in turn, remembering each layer's fastest run."""

    def __init__(
        self, op: Callable[..., None], step: Step, shape: AttentionShape, layers: int, device: torch.device
    ) -> None:
        self._op = op
        self._is_cuda = device.type == "cuda"
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self._before = [(step.qkv, *step.cache.layer_views(layer)) for layer in range(layers)]
        self._after = (step.out, heads, kv_heads, dim, dim**-0.5, None)

    def run(self, plan: AttentionPlan, layer: int) -> None:
        self._op(*self._before[layer], plan, *self._after)
        if self._is_cuda:
            torch.cuda.synchronize()

    def mean_of_best(self, plan: AttentionPlan, seconds: float) -> float:
        best = [float("inf")] * len(self._before)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for layer in range(len(best)):
                start = time.perf_counter()
                self.run(plan, layer)
                best[layer] = min(best[layer], time.perf_counter() - start)
        return sum(best) / len(best)


def sdpa_seconds(tokens: int, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> float:
    """torch's fused attention on contiguous, unpaged tensors of one request without context."""
    q = torch.randn(1, shape.num_heads, tokens, shape.head_dim, device=device).to(dtype)
    k, v = (torch.randn(1, shape.num_kv_heads, tokens, shape.head_dim, device=device).to(dtype) for _ in "kv")
    return best_seconds(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), device, 1.0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="reference", choices=sorted(OPS))
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each figure")
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    args = parser.parse_args()
    shape = AttentionShape(args.heads, args.kv_heads, args.head_dim)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    backend = create_backend(args.backend, shape, device)
    rng = np.random.default_rng(0)
    spread = [int(length) for length in rng.integers(200, 1501, 32)]
    cases: dict[str, tuple[list[int], list[int]]] = {
        "decode 1 x 256": ([1], [256]),
        "decode 1 x 1500": ([1], [1500]),
        "decode 32 x 150": ([1] * 32, [150] * 32),
        "decode 32 x 256": ([1] * 32, [256] * 32),
        "decode 32 x 200..1500": ([1] * 32, spread),
        "prefill 512": ([512], [512]),
        "prefill 1024": ([1024], [1024]),
        "prefill 512 after 1024": ([512], [1536]),
        "mixed 31 decodes + 256": ([1] * 31 + [256], [*spread[:31], 256]),
        "plan only 256 decodes": ([1] * 256, [64] * 256),
    }
    print(f"{args.backend} {args.dtype} {shape} block {args.block_size}, {torch.get_num_threads()} threads")
    print(f"{'case':24}{'plan us':>9}{'first extra us':>16}{'layer us':>10}{'GB/s':>7}{'GF/s':>7}  note")
    for name, (query_lens, context_lens) in cases.items():
        if args.only not in name:
            continue
        step = make_step(query_lens, context_lens, shape, args.layers, args.block_size, dtype, device)

        timer = LayerTimer(OPS[args.backend], step, shape, args.layers, device)
        plan = partial(backend.plan, step.metadata)
        plan_s = best_seconds(plan, device, args.seconds / 4)
        layer_s = timer.mean_of_best(plan(), args.seconds)
        first_s = best_seconds(lambda: timer.run(plan(), 0), device, args.seconds / 4) - plan_s - layer_s  # noqa: B023
        kv_bytes = sum(context_lens) * 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        pairs = sum(q * c - q * (q - 1) // 2 for q, c in zip(query_lens, context_lens, strict=True))
        flops = 4 * pairs * shape.num_heads * shape.head_dim
        note = ""
        if name in ("prefill 512", "prefill 1024"):
            note = f"torch SDPA {1e6 * sdpa_seconds(query_lens[0], shape, dtype, device):.0f} us"
        print(
            f"{name:24}{plan_s * 1e6:9.0f}{first_s * 1e6:16.0f}{layer_s * 1e6:10.1f}"
            f"{kv_bytes / layer_s / 1e9:7.1f}{flops / layer_s / 1e9:7.1f}  {note}",
            flush=True,
        )


if __name__ == "__main__":
    main()
