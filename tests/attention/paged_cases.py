"""Random steps over a poisoned paged cache, and the dense float64 attention that they must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata, AttentionPlan, PrefixGroup
from headrace.kernels.reference.attention import attention
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for


@dataclass
class PagedCase:
    """One step. keys, values: per request [context, K, D] float64, as stored (rounded to the cache's type)."""

    shape: AttentionShape
    metadata: AttentionMetadata
    qkv: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scale: float
    soft_cap: float | None = None

    def run(
        self, plan: AttentionPlan, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The reference op on a plan of this step: [T, H*D], in ``out`` if there is one."""
        shape = self.shape
        width = shape.num_heads * shape.head_dim
        if out is None:
            out = torch.full((len(self.qkv), width), torch.nan, dtype=out_dtype or self.qkv.dtype)
        attention(
            self.qkv,
            self.k_cache,
            self.v_cache,
            plan,
            out,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self.scale,
            self.soft_cap,
        )
        return out

    def oracle(self) -> torch.Tensor:
        """Dense attention in float64, request by request: [T, H*D]."""
        heads, dim = self.shape.num_heads, self.shape.head_dim
        group = heads // self.shape.num_kv_heads
        rows = []
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            start, stop = self.metadata.query_starts[index : index + 2]
            queries = self.qkv[start:stop, : heads * dim].double().view(-1, heads, dim)
            position = torch.arange(len(keys) - len(queries), len(keys))[:, None]
            key = torch.arange(len(keys))
            seen = key <= position
            if self.metadata.window is not None:
                seen &= key > position - self.metadata.window
            scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group, 1)) * self.scale
            if self.soft_cap is not None:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)).flatten(1))
        return torch.cat(rows)


def make_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    shape: AttentionShape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16),
    block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    soft_cap: float | None = None,
    prefix_blocks: Sequence[tuple[Any, ...]] = (),
    seed: int = 0,
    num_layers: int = 2,
    layer: int = 1,
) -> PagedCase:
    """A step whose cache holds NaN in every slot that no query may see.

    prefix_blocks: (requests, shared blocks[, first block]) of each shared prefix, outer ones first; the tables
        then name the same blocks.
    Blocks wholly before the window of a request's first query are released: -1 in its table.
    """
    generator = torch.Generator().manual_seed(seed)
    owned = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(owned) + 3
    specs = kv_cache_specs_for([window] * num_layers, shape.num_kv_heads, shape.head_dim, block_size, dtype)
    layout = KVCacheLayout.for_specs(specs, shape.num_kv_heads, shape.head_dim, block_size, dtype)
    cache = KVCache(specs, layout, num_blocks)
    cache.blocks.view(dtype).fill_(torch.nan)
    k_cache, v_cache = cache.layer_views(layer)
    ids = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    table = torch.full((len(owned), max(owned, default=0) + 2), -1, dtype=torch.int32)
    for index, count in enumerate(owned):
        table[index, :count] = ids[sum(owned[:index]) :][:count]
    pairs = [
        torch.randn(2, context, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
        for context in context_lens
    ]
    for requests, count, *_ in prefix_blocks:
        for request in requests:
            table[request, :count] = table[requests[0], :count]
            pairs[request][:, : count * block_size] = pairs[requests[0]][:, : count * block_size]

    for index, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        lowest = 0 if window is None else max(0, context - queries - window + 1)
        position = torch.arange(lowest, context)
        block = table[index, position // block_size].long()
        k_cache[block, :, position % block_size] = pairs[index][0, lowest:]
        v_cache[block, :, position % block_size] = pairs[index][1, lowest:]
        table[index, : lowest // block_size] = -1

    tokens = sum(query_lens)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    metadata = AttentionMetadata(
        query_starts=np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
        context_lens=np.array(context_lens, dtype=np.int32),
        block_table=table,
        block_size=block_size,
        window=window,
        shared_prefixes=tuple(
            PrefixGroup(np.array(requests, dtype=np.int32), *span) for requests, *span in prefix_blocks
        ),
    )
    return PagedCase(
        shape=shape,
        metadata=metadata,
        qkv=torch.randn(tokens, width, generator=generator).to(dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        keys=[pair[0].double() for pair in pairs],
        values=[pair[1].double() for pair in pairs],
        scale=shape.head_dim**-0.5,
        soft_cap=soft_cap,
    )


def random_lens(rng: np.random.Generator, requests: int, longest: int) -> tuple[list[int], list[int]]:
    """(query_lens, context_lens) of a mixed step: decodes, first chunks without context, and later chunks."""
    query_lens: list[int] = []
    context_lens: list[int] = []
    for kind in rng.integers(0, 4, requests):
        context = int(rng.integers(1, longest + 1))
        query = {0: 1, 1: context}.get(int(kind), int(rng.integers(1, context + 1)))
        query_lens.append(query)
        context_lens.append(context)
    return query_lens, context_lens
