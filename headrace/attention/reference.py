"""ReferenceBackend: plans for the plain-torch attention op, the CPU's default and the oracle of the others."""

from __future__ import annotations

import torch

from headrace.attention.base import AttentionShape, PlanLimits
from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.attention.plan_buffers import PlanBuffers, exact_plan
from headrace.attention.work_list import Tiling, build_work_list


class ReferenceBackend:
    """See ``AttentionBackend``. Tiles are sized so that one item's scores stay in a core's cache."""

    tiling = Tiling(tile_rows=64, kv_split_tokens=512, short_rows=1, short_split_tokens=512)

    def __init__(self, shape: AttentionShape, device: torch.device, limits: PlanLimits | None = None) -> None:
        self._device = device
        self._buffers = PlanBuffers(limits, self.tiling, device) if limits else None

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        work = build_work_list(metadata, self.tiling)
        if self._buffers is not None:
            return self._buffers.load(work, metadata)
        return exact_plan(work, metadata, self._device)
