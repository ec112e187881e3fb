"""Would long prompt chunks be faster through a library's attention? cuDNN's and FlashAttention 2 of torch, on one GPU.

    python benchmarks/kernels/bench_library_attention.py

A chunk of a prompt after cached context is its own square (causal, keys and values as they stand in qkv) and a
rectangle over the context, gathered from its blocks; both are merged by their log-sum-exp. Microseconds of a layer of
Llama-3-8B, with the gather and the merge (plain torch) apart, against the paged kernel; the relative difference of the
results; and what the first call with new lengths costs the host (cuDNN builds a plan for each), which decides from
which length on, and whether at all, this pays.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from triton_cases import LLAMA, paged_cache, randn
from triton_timing import event_ms

from headrace.attention.triton import TritonBackend
from headrace.kernels.triton.attention import attention

CASES = [(16384, 0), (8192, 0), (2048, 0), (8192, 8192), (8192, 21808), (2048, 14336)]
"""Tokens of the chunk, and cached ones before it."""
LIBRARIES = ("cudnn", "flash")

Pair = tuple[torch.Tensor, torch.Tensor]


def attend(library: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> Pair:
    """(result [1, H, T, D], its log-sum-exp [H, T])."""
    scale = q.shape[-1] ** -0.5
    if library == "cudnn":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
    else:
        group = q.shape[1] // k.shape[1]  # this one wants as many heads of keys as of queries
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
    return found[0], found[1].reshape(q.shape[1], -1)[:, : q.shape[2]]


def gather(cache: torch.Tensor, blocks: torch.Tensor, count: int) -> torch.Tensor:
    """[1, K, count, D] of a paged [N, K, B, D]."""
    return cache[blocks].transpose(0, 1).reshape(1, cache.shape[1], -1, cache.shape[3])[:, :, :count]


def merge(first: Pair, second: Pair) -> torch.Tensor:
    top = torch.maximum(first[1], second[1])
    one, other = (torch.exp(pair[1] - top)[None, :, :, None] for pair in (first, second))
    return ((first[0] * one + second[0] * other) / (one + other)).to(first[0].dtype)


def measure(num_rows: int, num_cached: int) -> None:
    device, shape = torch.device("cuda"), LLAMA.shape
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    metadata, cache = paged_cache(shape, [num_rows], [num_rows + num_cached], 2, device)
    k_cache, v_cache = cache[:, 0, 0], cache[:, 0, 1]
    blocks = metadata.block_table[0].long()
    qkv = randn(device, num_rows, LLAMA.qkv)
    rows = qkv.view(1, num_rows, -1, shape.head_dim).transpose(1, 2)
    q, k, v = rows.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    place = torch.arange(num_cached, num_cached + num_rows, device=device)
    for part, source in ((k_cache, k), (v_cache, v)):  # as rope_and_store leaves it
        part[blocks[place // 16], :, place % 16] = source[0].transpose(0, 1)
    plan = TritonBackend(shape, device).plan(metadata)
    out = torch.empty((num_rows, LLAMA.attended), dtype=qkv.dtype, device=device)
    run = partial(attention, qkv, k_cache, v_cache, plan, out, *heads, shape.head_dim**-0.5)
    flops = 4.0 * (num_rows * num_cached + num_rows * (num_rows + 1) / 2) * LLAMA.attended
    run()
    ours = 1e3 * event_ms(run, 5)
    print(f"{num_rows} after {num_cached}: paged kernel {ours:.0f} us ({flops / ours / 1e6:.0f} TFLOP/s)")
    for library in LIBRARIES:
        try:
            compare(library, (q, k, v), (k_cache, v_cache), blocks, num_cached, out, flops)
        except Exception as error:
            print(f"    {library}: {type(error).__name__} {str(error)[:200]}")


def compare(
    library: str,
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    caches: Pair,
    blocks: torch.Tensor,
    num_cached: int,
    expected: torch.Tensor,
    flops: float,
) -> None:
    q = own[0]
    start = time.perf_counter()
    square = attend(library, *own, True)
    torch.cuda.synchronize()
    first_ms = 1e3 * (time.perf_counter() - start)
    times = {"square": event_ms(lambda: attend(library, *own, True), 5)}
    result = square[0]
    if num_cached:
        k, v = (gather(cache, blocks, num_cached) for cache in caches)
        rectangle = attend(library, q, k, v, False)
        times["gather"] = event_ms(lambda: [gather(cache, blocks, num_cached) for cache in caches], 5)
        times["rectangle"] = event_ms(lambda: attend(library, q, k, v, False), 5)
        result = merge(square, rectangle)
        times["merge"] = event_ms(lambda: merge(square, rectangle), 5)
    found = result[0].transpose(0, 1).reshape(expected.shape).float()
    error = float((found - expected.float()).norm() / expected.float().norm())
    total = 1e3 * sum(times.values())
    parts = ", ".join(f"{name} {1e3 * ms:.0f}" for name, ms in times.items())
    print(
        f"    {library}: {total:.0f} us ({flops / total / 1e6:.0f} TFLOP/s): {parts}; differs by {error:.1e}; first "
        f"call of these lengths {first_ms:.0f} ms",
        flush=True,
    )


def main() -> None:
    for num_rows, num_cached in CASES:
        measure(num_rows, num_cached)


if __name__ == "__main__":
    main()
