"""NativeBackend: plans for the C++ attention op of CPUs."""

from __future__ import annotations

import torch

from headrace.attention.base import AttentionShape, PlanLimits
from headrace.attention.followed_plan import FollowedPlan
from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.attention.reference import ReferenceBackend
from headrace.attention.work_list import Tiling


class NativeBackend(ReferenceBackend):
    """See ``AttentionBackend``. An item's keys and values are packed once for all its rows: many rows share that work,
    and a split's worth of keys leaves room for it in a core's cache. While the same requests decode, one plan follows
    them, so that a plan is valid until the next one."""

    tiling = Tiling(tile_rows=256, kv_split_tokens=1024, short_rows=1, short_split_tokens=512)

    def __init__(self, shape: AttentionShape, device: torch.device, limits: PlanLimits | None = None) -> None:
        super().__init__(shape, device, limits)
        self._followed: FollowedPlan | None = None

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        plan = self._followed.next(metadata) if self._followed is not None else None
        if plan is None:
            plan = super().plan(metadata)
            self._followed = FollowedPlan.of(metadata, plan, self.tiling)
        return plan
