"""From a host work list to an ``AttentionPlan`` on the device: exact-size tensors, or buffers that never move."""

from __future__ import annotations

import dataclasses

import torch

from headrace.attention.base import PlanLimits
from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.attention.work_list import Tiling, WorkList
from headrace.core.kv_cache_spec import MAX_LEVELS
from headrace.errors import CapacityError

FIELDS = tuple(field.name for field in dataclasses.fields(WorkList))


def exact_plan(work: WorkList, metadata: AttentionMetadata, device: torch.device) -> AttentionPlan:
    """A plan whose tensors are as long as the work list and live as long as the plan."""
    tensors = {name: torch.from_numpy(getattr(work, name)).to(device) for name in FIELDS}
    return _assemble(tensors, work, metadata)


class PlanBuffers:
    """Fixed device memory for the plans of one KV group, so that a CUDA graph finds every plan at one address.

    Args:
        limits: the largest step; the buffers hold its worst case.
        tiling: how the backend cuts work.
        device: where.
    """

    def __init__(self, limits: PlanLimits, tiling: Tiling, device: torch.device) -> None:
        self._capacity = capacities(limits, tiling)
        self._tensors = {
            name: torch.zeros(length, dtype=torch.int32, device=device)
            for name, length in self._capacity.items()
        }

    def load(self, work: WorkList, metadata: AttentionMetadata) -> AttentionPlan:
        """Overwrite the buffers with a work list; the last plan made from them is no longer valid.

        Raises:
            CapacityError: the step is larger than the limits; the buffers still hold the last plan.
        """
        for name in FIELDS:
            if len(getattr(work, name)) > self._capacity[name]:
                raise CapacityError(
                    f"an attention plan needs {len(getattr(work, name))} entries of {name}, but its buffer holds "
                    f"{self._capacity[name]}; raise PlanLimits or schedule fewer tokens in one step"
                )
        for name in FIELDS:
            values = getattr(work, name)
            self._tensors[name][: len(values)].copy_(torch.from_numpy(values))
        return _assemble(self._tensors, work, metadata)


def capacities(limits: PlanLimits, tiling: Tiling) -> dict[str, int]:
    """Length of each plan array in the worst step within ``limits``, shared prefixes included.

    Every token stands in one tile of its request and at most one tile of a shared prefix at each level. The ranges of
    a row are disjoint, so together they are cut into at most one item a level more than its whole context would be.
    """
    tokens, requests = limits.max_tokens, min(limits.max_requests, limits.max_tokens)
    request_tiles = requests + tokens // tiling.tile_rows
    prefix_tiles = MAX_LEVELS * (requests // 2 + tokens // tiling.tile_rows)
    split = min(tiling.kv_split_tokens, tiling.short_split_tokens)
    splits = -(-limits.max_context_tokens // split)
    items = (request_tiles + prefix_tiles) * splits
    partials = tokens * (splits + MAX_LEVELS)
    lengths = dict.fromkeys(FIELDS, items)
    lengths |= dict.fromkeys(("query_rows", "row_positions"), (1 + MAX_LEVELS) * tokens)
    return lengths | {"reduce_rows": tokens, "reduce_starts": tokens + 1, "reduce_slots": partials}


def _assemble(tensors: dict[str, torch.Tensor], work: WorkList, metadata: AttentionMetadata) -> AttentionPlan:
    return AttentionPlan(
        block_size=metadata.block_size,
        window=metadata.window,
        block_table=metadata.block_table,
        num_tokens=int(metadata.query_starts[-1]),
        num_items=len(work.item_request),
        num_rows=len(work.query_rows),
        num_partials=len(work.reduce_slots),
        num_reductions=len(work.reduce_rows),
        derived={},
        **tensors,
    )
