"""What a forward pass knows of its attention: metadata in, plan out, both carried by ``ForwardBatch``.

Legend: T query tokens of the step, R requests, I work items, N gathered query rows, P partial results,
M rows that are merged from several partials, B block size.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixGroup:
    """Requests whose first ``num_blocks`` blocks are the same.

    requests: rows of the block table, at least two.
    num_blocks: shared full blocks; none of them holds a position that this step computes.
    first_block: the span begins here. The groups of one request (``MAX_LEVELS`` at most) follow one another from its
        first block on: where one ends the next begins.
    """

    requests: IntArray
    num_blocks: int
    first_block: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step of one KV group, in batch order. What ``AttentionBackend.plan`` gets.

    query_starts: [R+1], on the host; request i owns query tokens [query_starts[i], query_starts[i+1]), maybe none.
    context_lens: [R], on the host; tokens in the KV cache after this step, so the queries of request i stand at the
        last positions before context_lens[i].
    block_table: [R, max_blocks] int32 on the device; -1 marks released or unused entries, which are never read.
        Planners need lengths only and do not read it.
    block_size: tokens in a block.
    window: a token at position p attends to positions > p - window; None for full attention.
    shared_prefixes: read once for all their requests (cascade); an optimisation, never needed for correctness.
    """

    query_starts: IntArray
    context_lens: IntArray
    block_table: torch.Tensor
    block_size: int
    window: int | None = None
    shared_prefixes: tuple[PrefixGroup, ...] = ()


@dataclass(slots=True, eq=False)
class AttentionPlan:
    """The attention of one step of one KV group, as work items and reductions. Made once, run by every layer.

    A work item is a tile of query rows against one range of one request's KV::

        item i:  rows  query_rows[item_row_start[i] : + item_num_rows[i]]     (tokens of the step, gathered)
                 keys  positions [item_kv_start[i], item_kv_end[i]) of block_table[item_request[i]]
                 out   partial slots item_partial_start[i], + 1, ...   one a row; -1: the rows have no other item,
                       so the item writes final outputs

    A partial is an output row [H, D] and its log-sum-exp [H]. A reduction merges all partials of one row::

        merge m: token reduce_rows[m] <- partials reduce_slots[reduce_starts[m] : reduce_starts[m+1]]

    Within an item, row r sees key j when j <= row_positions[r] and j > row_positions[r] - window. An item may hold
    rows that see none of its keys; such partials weigh nothing. Every row sees a key (its own) in some item.
    Planners for CPUs cut KV ranges at multiples of a length (and at the ends of shared prefixes), whatever the rest of
    the batch is, so a row's sums do not depend on its neighbours.

    All tensors are int32 on the device. They may be longer than the plan (fixed buffers under a CUDA graph): the
    lengths are the ``num_…`` ints.

    derived: what an op works out of the plan once a step and every layer reuses, by a key of the op's own. Cleared
        by making a new plan.
    """

    block_size: int
    window: int | None
    block_table: torch.Tensor
    num_tokens: int
    num_items: int
    num_rows: int
    num_partials: int
    num_reductions: int
    query_rows: torch.Tensor
    row_positions: torch.Tensor
    item_request: torch.Tensor
    item_kv_start: torch.Tensor
    item_kv_end: torch.Tensor
    item_row_start: torch.Tensor
    item_num_rows: torch.Tensor
    item_partial_start: torch.Tensor
    reduce_rows: torch.Tensor
    reduce_starts: torch.Tensor
    reduce_slots: torch.Tensor
    derived: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """One KV group's part of a step.

    slot_mapping: [T] int64, on the device; token t's K and V go to slot block_id * block_size + offset.
    plan: the step's attention over this group's layers.
    """

    slot_mapping: torch.Tensor
    plan: AttentionPlan


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The argument of a model's forward: everything it may know of the step.

    num_tokens: T, all requests' tokens one after another, no padding.
    input_ids: [T] int64, on the device.
    positions: [T] int64, on the device; each token's index in its own sequence.
    groups: one per KV group, in the order of the model's ``kv_cache_specs``.
    """

    num_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupBatch, ...]
