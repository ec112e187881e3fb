"""Random attention steps over a poisoned paged cache on any device, and their dense float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata, PrefixGroup
from headrace.kernels.quantized_cache import KV_FORMATS, QuantizedCache
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for


@dataclass
class PagedStep:
    """One step; K and V [num_blocks, K, B, D] are one layer of a cache with several."""

    shape: AttentionShape
    metadata: AttentionMetadata
    qkv: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scale: float
    soft_cap: float | None

    def oracle(self) -> torch.Tensor:
        """[T, H*D] float64, request by request over keys gathered from the cache."""
        shape, data = self.shape, self.metadata
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        device = self.qkv.device
        rows = []
        for index, context in enumerate(data.context_lens.tolist()):
            start, stop = data.query_starts[index : index + 2].tolist()
            queries = self.qkv[start:stop, : heads * dim].double().view(-1, heads, dim)
            first = context - len(queries)
            lowest = 0 if data.window is None else max(0, first - data.window + 1)
            key = torch.arange(lowest, context, device=device)
            block = data.block_table[index, key // data.block_size].long()
            keys, values = (
                cache[block, :, key % data.block_size].double().repeat_interleave(heads // kv_heads, 1)
                for cache in (self.k_cache, self.v_cache)
            )
            position = torch.arange(first, context, device=device)[:, None]
            seen = key <= position
            if data.window is not None:
                seen &= key > position - data.window
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.scale
            if self.soft_cap is not None:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        return torch.cat(rows)


def make_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    prefixes: Sequence[tuple[Any, ...]] = (),
    seed: int = 0,
    num_layers: int = 2,
) -> PagedStep:
    """A step whose cache holds NaN in every slot that no query may see.

    prefixes: (requests, shared blocks[, first block]), outer ones first; the tables then name the same blocks.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    rng = np.random.default_rng(seed)
    owned = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(owned) + 3
    kv_heads, dim = shape.num_kv_heads, shape.head_dim
    layers = torch.full(
        (num_blocks, num_layers, 2, kv_heads, block_size, dim), torch.nan, dtype=dtype, device=device
    )
    ids = rng.permutation(num_blocks).astype(np.int32)
    table = np.full((len(owned), max(owned, default=0) + 2), -1, np.int32)
    for index, count in enumerate(owned):
        table[index, :count] = ids[sum(owned[:index]) :][:count]
    for requests, count, *_ in prefixes:
        table[list(requests), :count] = table[requests[0], :count]
    k_cache, v_cache = layers[:, -1, 0], layers[:, -1, 1]
    for index, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        lowest = 0 if window is None else max(0, context - queries - window + 1)
        key = torch.arange(lowest, context, device=device)
        block = torch.from_numpy(table[index]).to(device)[key // block_size].long()
        for cache in (k_cache, v_cache):
            values = torch.randn(len(key), kv_heads, dim, generator=generator, device=device)
            cache[block, :, key % block_size] = values.to(dtype)
        table[index, : lowest // block_size] = -1
    width = (shape.num_heads + 2 * kv_heads) * dim
    metadata = AttentionMetadata(
        query_starts=np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
        context_lens=np.array(context_lens, np.int32),
        block_table=torch.from_numpy(table).to(device),
        block_size=block_size,
        window=window,
        shared_prefixes=tuple(PrefixGroup(np.array(list(ids)), *span) for ids, *span in prefixes),
    )
    return PagedStep(
        shape=shape,
        metadata=metadata,
        qkv=torch.randn(sum(query_lens), width, generator=generator, device=device).to(dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        scale=dim**-0.5,
        soft_cap=soft_cap,
    )


def quantized(step: PagedStep, name: str) -> tuple[PagedStep, QuantizedCache, QuantizedCache]:
    """(the step over what the codes mean, keys and values as codes in a layout like a ``KVCache``'s)."""
    forms = KV_FORMATS[name]
    num_blocks, kv_heads, block_size, dim = step.k_cache.shape
    layout = KVCacheLayout(1, kv_heads, block_size, dim, forms)
    specs = kv_cache_specs_for([None], kv_heads, dim, block_size, forms)
    cache = KVCache(specs, layout, num_blocks, step.k_cache.device)
    views = cache.layer_views(0)
    for view, dense in zip(views, (step.k_cache, step.v_cache), strict=True):
        codes, words = view.format.encode(dense.nan_to_num(3.0))
        view.codes.view(torch.uint8).copy_(codes.view(torch.uint8))
        view.words.copy_(torch.where(dense.isnan().any(-1), torch.nan, words))
    every = torch.arange(num_blocks, device=step.k_cache.device)
    k_cache, v_cache = (view.decode_blocks(every, torch.float32) for view in views)
    return replace(step, k_cache=k_cache, v_cache=v_cache), *views
