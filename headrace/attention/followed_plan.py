"""FollowedPlan: the plan of decodes that go on for another step: the last one and a token more for each of them."""

from __future__ import annotations

import numpy as np

from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.attention.work_list import Tiling


class FollowedPlan:
    """A plan of one token a request, changed in place from step to step while the same requests decode.

    Items keep the order of the first plan's work: only what shared prefixes and own contexts have in common shifts.

    Args:
        metadata: of a step in which every request has one query token and no window.
        plan: made for it, on the CPU; nobody else changes it.
        split_tokens: where the ranges of single rows are cut.
    """

    def __init__(self, metadata: AttentionMetadata, plan: AttentionPlan, split_tokens: int) -> None:
        self._plan = plan
        self._query_starts = metadata.query_starts
        self._prefixes = metadata.shared_prefixes
        self._next_lens = metadata.context_lens + np.int32(1)
        self._positions, self._ends = plan.row_positions.numpy(), plan.item_kv_end.numpy()
        # The own range of a request is what ends at its newest token; nothing shared does.
        lengths = metadata.context_lens[plan.item_request.numpy()]
        self._grows = (self._ends == lengths).astype(np.int32)
        self._steps_left = split_tokens - 1 - int(((metadata.context_lens - 1) % split_tokens).max())

    @classmethod
    def of(cls, metadata: AttentionMetadata, plan: AttentionPlan, tiling: Tiling) -> FollowedPlan | None:
        """None: the step has other requests than decodes, or a window."""
        num_requests = len(metadata.context_lens)
        is_decode = num_requests and metadata.window is None and (np.diff(metadata.query_starts) == 1).all()
        if not is_decode or not tiling.short_rows:
            return None
        return cls(metadata, plan, tiling.short_split_tokens)

    def next(self, metadata: AttentionMetadata) -> AttentionPlan | None:
        """The plan of the step after the last one; None: other requests, or a range that needs another cut."""
        is_next = (
            self._steps_left > 0
            and metadata.window is None
            and len(metadata.context_lens) == len(self._next_lens)
            and metadata.shared_prefixes == self._prefixes
            and (metadata.context_lens == self._next_lens).all()
            and (metadata.query_starts == self._query_starts).all()
        )
        if not is_next:
            return None
        self._steps_left -= 1
        self._next_lens += 1
        self._positions += 1
        self._ends += self._grows
        self._plan.block_table = metadata.block_table
        return self._plan
