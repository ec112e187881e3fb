"""A model over a paged KV cache: runs steps of any mix of requests, with blocks scattered over memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headrace.attention.base import AttentionShape, create_backend
from headrace.attention.metadata import AttentionMetadata, ForwardBatch, GroupBatch
from headrace.checkpoint import load_architecture, resolve_model
from headrace.kernels.arena import Arena
from headrace.kernels.registry import Ops
from headrace.layers.context import LayerContext
from headrace.loader.base import WeightSource, open_weights
from headrace.models.registry import build_model
from headrace.parallel.state import ParallelState
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for

CPU = torch.device("cpu")


class PagedModel:
    """Requests are numbered from 0; each has ``max_tokens`` tokens of cache, in blocks of every group.

    Args:
        folder: a Hugging Face folder.
        num_requests, max_tokens: size of the cache.
    """

    def __init__(
        self,
        folder: Path,
        num_requests: int = 1,
        max_tokens: int = 128,
        *,
        dtype: torch.dtype = torch.float32,
        block_size: int = 8,
        parallel: ParallelState | None = None,
        ops: Ops | None = None,
        weights: WeightSource | None = None,
    ) -> None:
        source = resolve_model(str(folder))
        self.arch = arch = load_architecture(source)
        self.parallel = parallel or ParallelState()
        self.weights = weights or open_weights(source, arch)
        self.context = LayerContext(
            ops=ops or Ops.for_device(CPU, "reference", self.parallel.communicator),
            weights=self.weights,
            dtype=dtype,
            device=CPU,
            arena=Arena(CPU),
            parallel=self.parallel,
        )
        self.model = build_model(arch, self.context)
        heads = (self.model.num_kv_heads, arch.head_dim)
        specs = kv_cache_specs_for(arch.layer_windows, *heads, block_size, dtype)
        self.num_groups, self.block_size = len(specs), block_size
        blocks_each = -(-max_tokens // block_size)
        num_blocks = num_requests * blocks_each * len(specs)
        layout = KVCacheLayout.for_specs(specs, *heads, block_size, dtype)
        self.cache = KVCache(specs, layout, num_blocks, CPU)
        self.cache.blocks.fill_(0xFF)  # NaN in every float type: what was never stored must not matter
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).int()
        self.block_tables = order.view(len(specs), num_requests, blocks_each)
        self.model.bind_kv_cache(self.cache)
        shape = AttentionShape(self.model.num_heads, *heads)
        self._backends = [create_backend("reference", shape, CPU) for _ in specs]
        self._windows = [spec.window for spec in specs]
        self.num_computed = [0] * num_requests

    def batch(self, work: Sequence[tuple[int, torch.Tensor]]) -> ForwardBatch:
        """A step that computes the given tokens of each (request, tokens), after those it has computed before."""
        starts = [self.num_computed[request] for request, _ in work]
        counts = [len(tokens) for _, tokens in work]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        rows = torch.tensor([request for request, _ in work])
        owner = rows.repeat_interleave(torch.tensor(counts))
        query_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        context_lens = np.array([s + n for s, n in zip(starts, counts, strict=True)], np.int32)
        groups = []
        for table, backend, window in zip(self.block_tables, self._backends, self._windows, strict=True):
            block = table[owner, positions // self.block_size].long()
            slots = block * self.block_size + positions % self.block_size
            metadata = AttentionMetadata(query_starts, context_lens, table[rows], self.block_size, window)
            groups.append(GroupBatch(slots, backend.plan(metadata)))
        tokens = torch.cat([tokens for _, tokens in work])
        return ForwardBatch(len(tokens), tokens, positions, tuple(groups))

    def advance(self, work: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Counts the tokens of a step as computed."""
        for request, tokens in work:
            self.num_computed[request] += len(tokens)

    def step(self, work: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Runs a step; logits [T, V] of all its tokens."""
        batch = self.batch(work)
        self.advance(work)
        hidden = self.model.forward(batch)
        return self.model.compute_logits(hidden, torch.arange(batch.num_tokens)).whole().clone()
