"""Attention of decodes over caches of 8 bits: both kernels, and launches of the ring's to choose from, beside bf16."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from triton_cases import COLD_BYTES, LLAMA, attention_error, attention_launches, error_of, paged_cache, randn
from triton_timing import MEMORY_BYTES_PER_S, Launch, compiling_only, graphs_us

import headrace.kernels.triton.attention as attention_op
from headrace.attention import ring_split
from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.attention.triton import TritonBackend
from headrace.kernels.quantized_cache import KV_FORMATS, QuantizedCache
from headrace.kernels.triton.attention_ring_tiles import ring_launch
from headrace.kernels.triton.attention_tiles import LaunchShape
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for

CASES = ((8, 20_000), (64, 1_024), (1, 32_768), (256, 600), (8, 1_024), (16, 4_096))
"""Requests, and tokens of each."""
FORMATS = ("fp8_e4m3", "int8", "fp8_e5m2")
RINGS = (
    LaunchShape(16, 32, 2, 1, 8),
    LaunchShape(16, 16, 4, 1, 12),
    LaunchShape(16, 64, 3, 2, 4),
    LaunchShape(16, 128, 2, 4, 2),
)
"""Each with contexts cut for its waves."""
MAX_ERROR = 1e-2

Way = tuple[str, list[Launch], Callable[[], float]]
"""Name, a launch for each layer, relative error of the last layer's result."""


def compare(processes: int, variants: bool, seconds: float) -> dict[str, dict[str, float]]:
    """{case: {way: microseconds of a layer}}; the kernels are compiled in so many processes first."""
    start = time.perf_counter()
    children = [
        subprocess.Popen([sys.executable, __file__, f"{index}/{processes}", str(int(variants))])
        for index in range(processes)
    ]
    for child in children:
        child.wait()
    print(f"{torch.cuda.get_device_name()}; compiled in {time.perf_counter() - start:.0f} s; us a layer")
    found: dict[str, dict[str, float]] = {}
    for count, length in CASES:
        if time.perf_counter() - start > seconds:
            print("out of time")
            break
        found[f"{count} x {length}"] = _measure(count, length, variants)
    return found


def compile_part(index: int, count: int, variants: bool) -> None:
    """Every ``count``-th kernel from the ``index``-th on into Triton's cache on disk, without a GPU."""
    device, launches = torch.device("meta"), []
    with compiling_only() as compiled:
        for requests in sorted({count for count, _ in CASES}):
            metadata, dense = paged_cache(LLAMA.shape, [1] * requests, [32] * requests, 2, device)
            launches += [attention_launches(LLAMA, metadata, dense)[0][0]]
            if requests == 8 or not variants:  # variants are the same for all
                ways = (way for name in FORMATS for way in _coded_ways(metadata, name, 2, variants, device))
                launches += [layers[0] for _, layers, _ in ways]
        for launch in launches[index::count]:
            launch()
    print(f"{len(compiled)} launches compiled", flush=True)


def _measure(count: int, length: int, variants: bool) -> dict[str, float]:
    device, shape = torch.device("cuda"), LLAMA.shape
    num_numbers = 2 * count * length * shape.num_kv_heads * shape.head_dim
    layers = max(2, min(32, -(-COLD_BYTES // num_numbers)))
    metadata, dense = paged_cache(shape, [1] * count, [length] * count, layers, device)
    launches, qkv, out = attention_launches(LLAMA, metadata, dense)
    check = partial(attention_error, shape, metadata, qkv, dense[:, layers - 1], out, shape.head_dim**-0.5)
    ways: list[Way] = [("bf16", launches, check)]
    for name in FORMATS:
        ways += _coded_ways(metadata, name, layers, variants, device)
    good: list[Way] = []
    for way in ways:
        try:
            for launch in way[1]:
                launch()
            error = way[2]()
        except Exception as exception:
            error = float("nan")
            print(f"{way[0]}: {type(exception).__name__}: {str(exception)[:300]}", flush=True)
        if error <= MAX_ERROR:
            good.append(way)
        else:
            print(f"{count} x {length} {way[0]}: AN ERROR OF {error}", flush=True)
    samples = graphs_us([way[1] for way in good], seconds=0.03)
    times = {way[0]: statistics.median(found) for way, found in zip(good, samples, strict=True)}
    limit = 1e6 * num_numbers / MEMORY_BYTES_PER_S
    print(f"{count} x {length}: limits {2 * limit:.0f} and {limit * (1 + 4 / shape.head_dim):.0f}")
    for name, spent in times.items():
        print(f"    {name:44}{spent:8.1f}", flush=True)
    return times


def _coded_ways(
    metadata: AttentionMetadata, name: str, layers: int, variants: bool, device: torch.device
) -> Iterator[Way]:
    """The kernel with words in registers, the ring with its own launch or all of ``RINGS``."""
    shape, forms = LLAMA.shape, KV_FORMATS[name]
    num_blocks = -(-int(metadata.context_lens.sum()) // 16) + len(metadata.context_lens)
    specs = kv_cache_specs_for([None] * layers, shape.num_kv_heads, shape.head_dim, 16, forms)
    layout = KVCacheLayout.for_specs(specs, shape.num_kv_heads, shape.head_dim, 16, forms)
    cache = KVCache(specs, layout, num_blocks, device)
    if device.type != "meta":
        cache.blocks.fill_(255)  # no number, as codes of fp8 and as a scale
        for layer in range(layers):
            _fill(cache.layer_views(layer), metadata)
    num_tokens = int(metadata.query_starts[-1])
    qkv = randn(device, num_tokens, LLAMA.qkv)
    out = torch.full((num_tokens, LLAMA.attended), torch.nan, dtype=qkv.dtype, device=device)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    scale = shape.head_dim**-0.5

    def plan_for(ring: LaunchShape | None) -> AttentionPlan:
        wave = 0 if ring is None else 132 * ring.programs_per_multiprocessor
        with mock.patch.object(ring_split, "ring_wave", lambda _: wave):
            planner = TritonBackend(replace(shape, is_coded=ring is not None), device)
            return planner.plan(metadata)

    def launch(layer: int, ring: LaunchShape | None, plan: AttentionPlan) -> None:
        with (
            mock.patch.object(attention_op, "takes_ring", lambda _: ring is not None),
            mock.patch.object(attention_op, "ring_launch", lambda _: ring),
        ):
            attention_op.attention(qkv, *cache.layer_views(layer), plan, out, *heads, scale)

    def check() -> float:
        error = _error(metadata, qkv, cache.layer_views(layers - 1), out, scale)
        out.fill_(torch.nan)
        return error

    rings = RINGS if variants else (ring_launch(num_tokens * shape.num_kv_heads),)
    for ring in (None, *rings):
        numbers = (
            f" {ring.block_n},{ring.num_stages},{ring.num_warps},{ring.programs_per_multiprocessor}"
            if ring
            else ""
        )
        plan = plan_for(ring)
        launches = [partial(launch, layer, ring, plan) for layer in range(layers)]
        yield f"{name} {'ring' if ring else 'words'}{numbers}", launches, check


def _fill(views: tuple[QuantizedCache, QuantizedCache], metadata: AttentionMetadata) -> None:
    """Random keys and values into the slots of all tokens."""
    for request, length in enumerate(metadata.context_lens.tolist()):
        key = torch.arange(length, device=metadata.block_table.device)
        block = metadata.block_table[request, key // 16].long()
        for view in views:
            values = torch.randn((length, view.codes.shape[1], view.head_dim), device=key.device)
            view.store(values * (1 + key[:, None, None] % 7), block, key % 16)


def _error(
    metadata: AttentionMetadata,
    qkv: torch.Tensor,
    views: tuple[QuantizedCache, QuantizedCache],
    out: torch.Tensor,
    scale: float,
) -> float:
    """Of the first, a middle and the last request against float64 over what the codes mean; NaN if any is none."""
    if not torch.isfinite(out).all():
        return float("nan")
    shape, errors = LLAMA.shape, []
    group = shape.num_heads // shape.num_kv_heads
    for request in {0, len(out) // 2, len(out) - 1}:
        length = int(metadata.context_lens[request])
        blocks = metadata.block_table[request, : -(-length // 16)].long()
        keys, values = (
            view.decode_blocks(blocks, torch.float64).transpose(0, 1).flatten(1, 2)[:, :length]
            for view in views
        )
        query = qkv[request, : shape.num_heads * shape.head_dim].double().view(-1, group, shape.head_dim)
        weights = (torch.einsum("kgd,knd->kgn", query, keys) * scale).softmax(-1)
        errors.append(error_of(out[request], torch.einsum("kgn,knd->kgd", weights, values).flatten()))
    return max(errors)


if __name__ == "__main__":
    compile_part(*map(int, sys.argv[1].split("/")), bool(int(sys.argv[2])))
