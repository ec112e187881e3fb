"""GraphInputs: a step's inputs at device addresses that never move, filled by one copy a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.runtime.request_states import RequestStates
from headrace.runtime.sampling_states import PlainDraw
from headrace.runtime.step_layout import StepLayout

_NOWHERE = -1
_NUM_COMMON = 6


@dataclass(frozen=True, slots=True, eq=False)
class InputViews:
    """The inputs of steps padded to B tokens.

    ids, positions: [B] int64.  slot_mappings: of each KV group, [B] int64, -1 for padding.
    tables: of each KV group, [min(B, requests), blocks] int32 in batch order.
    sampled_rows, sampled_places, key, temperature, is_random: [B], their i-th entry is about the request that samples
        i-th: its row of the hidden states, where its token goes (that of padding is a place that nobody reads), and
        what it draws with (int64, float32, and 1.0 or 0.0).
    places: [B] int64, where the ids stand in the flat token table.  slots: [B] int64, of the requests.
    uploaded: [bytes] uint8, all that the host sends.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slot_mappings: list[torch.Tensor]
    tables: list[torch.Tensor]
    sampled_rows: torch.Tensor
    sampled_places: torch.Tensor
    key: torch.Tensor
    temperature: torch.Tensor
    is_random: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    uploaded: torch.Tensor


class GraphInputs:
    """Makes the views of each bucket and fills them.

    What the host knows comes in one copy; what the device knows (token ids, block tables) is gathered there by
    ``gather``, whose kernels belong into the graph.

    Args:
        states: the requests' persistent state.
        num_groups: KV groups.
        max_tokens: the largest bucket.
        max_requests: the most requests of a step.
        device: where.
    """

    def __init__(
        self, states: RequestStates, num_groups: int, max_tokens: int, max_requests: int, device: torch.device
    ) -> None:
        self._states = states
        self._num_groups = num_groups
        self._max_requests = max_requests
        self._device = device
        self._ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        num_blocks = states.batch_blocks_width
        self._tables = torch.zeros(
            (num_groups, min(max_tokens, max_requests), num_blocks), dtype=torch.int32, device=device
        )
        self._memory = torch.zeros(self._num_bytes(max_tokens), dtype=torch.uint8, device=device)
        self._views: dict[int, InputViews] = {}

    def views(self, bucket: int) -> InputViews:
        """The inputs of steps padded to ``bucket`` tokens."""
        if bucket not in self._views:
            self._views[bucket] = self._make_views(bucket)
        return self._views[bucket]

    def fill(self, step: StepLayout, bucket: int, draw: PlainDraw | None) -> None:
        """Send a step's inputs, padded to the bucket; waits for nothing.

        Args:
            draw: what the rows draw with, or None when all take their best token.
        """
        pin = self._device.type == "cuda"
        # torch keeps pinned memory from being reused until copies from it are done
        staging = torch.empty(self._num_bytes(bucket), dtype=torch.uint8, pin_memory=pin, device="cpu")
        host = staging.numpy()
        num_fields = self._num_fields
        fields = host[: num_fields * 8 * bucket].view(np.int64).reshape(num_fields, bucket)
        count, num_requests, num_sampled = step.num_tokens, len(step.slots), len(step.sampled_places)
        fields[:_NUM_COMMON] = 0
        fields[0, :count] = step.positions
        fields[1, :count] = step.places
        fields[2, :num_requests] = step.slots
        fields[3, :num_sampled] = step.sampled_rows
        fields[4, :num_sampled] = step.sampled_places
        fields[4, num_sampled:] = self._states.unread_place
        for group, mapping in enumerate(step.slot_mappings, start=_NUM_COMMON):
            fields[group, :count] = mapping
            fields[group, count:] = _NOWHERE
        if draw is not None:
            fields[5, :num_sampled] = draw.key
            floats = host[num_fields * 8 * bucket :].view(np.float32).reshape(2, bucket)
            floats[:] = np.array([[1.0], [0.0]])
            floats[0, :num_sampled] = draw.temperature
            floats[1, :num_sampled] = draw.is_random
        self.views(bucket).uploaded.copy_(staging, non_blocking=True)

    def gather(self, bucket: int) -> None:
        """Read the ids and block tables of the step last filled in; device work only."""
        views = self.views(bucket)
        tokens = self._states.tokens.tensor.view(-1)
        views.ids.copy_(torch.index_select(tokens, 0, views.places))
        for group, table in enumerate(views.tables):
            self._states.gather_blocks(group, views.slots[: len(table)], table)

    @property
    def _num_fields(self) -> int:
        return _NUM_COMMON + self._num_groups

    def _num_bytes(self, bucket: int) -> int:
        return bucket * (8 * self._num_fields + 8)

    def _make_views(self, bucket: int) -> InputViews:
        uploaded = self._memory[: self._num_bytes(bucket)]
        num_fields = self._num_fields
        fields = uploaded[: num_fields * 8 * bucket].view(torch.int64).view(num_fields, bucket)
        floats = uploaded[num_fields * 8 * bucket :].view(torch.float32).view(2, bucket)
        return InputViews(
            ids=self._ids[:bucket],
            positions=fields[0],
            slot_mappings=list(fields[_NUM_COMMON:]),
            tables=[table[: min(bucket, self._max_requests)] for table in self._tables],
            sampled_rows=fields[3],
            sampled_places=fields[4],
            key=fields[5],
            temperature=floats[0],
            is_random=floats[1],
            places=fields[1],
            slots=fields[2],
            uploaded=uploaded,
        )
