"""StepLayout: one step's requests in batch order, as arrays on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.attention.metadata import AttentionMetadata, PrefixGroup
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import NewRequest, SchedulerOutput, SharedPrefix
from headrace.runtime.request_states import RequestStates


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """The step's positions after which a prompt token's log-probability is wanted, of one request.

    rows: [first, end) rows of the hidden states; their targets are the flat places [first_target, …) in the table.
    """

    request: NewRequest
    first_row: int
    end_row: int
    first_target: int


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Where a step's tokens stand. T tokens, R requests, S of them sample; arrays are int64.

    slots, ends: [R], each request's slot and its length after the step.  query_starts: [R+1].
    positions, places: [T], in the sequence and in the flat token table.
    slot_mappings: of each KV group, [T]: where the token's K and V go.
    sampled_ids: [S] request ids, in batch order.  sampled_slots: [S].
    sampled_positions: [S], index of the token to be sampled in its sequence.
    sampled_rows: [S], rows of the hidden states.
    sampled_places: [S], where the tokens go in the flat token table.
    prefixes: shared by several requests.
    prompt_rows: of requests that want log-probabilities of their prompt.
    """

    slots: np.ndarray
    ends: np.ndarray
    query_starts: np.ndarray
    positions: np.ndarray
    places: np.ndarray
    slot_mappings: list[np.ndarray]
    sampled_ids: list[str]
    sampled_slots: np.ndarray
    sampled_positions: np.ndarray
    sampled_rows: np.ndarray
    sampled_places: np.ndarray
    prefixes: tuple[PrefixGroup, ...]
    prompt_rows: list[PromptRows]

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.positions)

    @property
    def is_decode(self) -> bool:
        """Whether every request has one token and samples: row i of everything is request i."""
        return len(self.sampled_ids) == len(self.slots) == len(self.positions)

    def attention(self, spec: KVCacheSpec, block_table: torch.Tensor, block_size: int) -> AttentionMetadata:
        """What a backend plans from, for one KV group.

        Args:
            block_table: [R or more, blocks] int32 on the device, in batch order.
        """
        return AttentionMetadata(
            query_starts=self.query_starts.astype(np.int32),
            context_lens=self.ends.astype(np.int32),
            block_table=block_table,
            block_size=block_size,
            window=spec.window,
            shared_prefixes=self.prefixes if spec.window is None else (),
        )


class StepLayouts:
    """Makes the layout of each step whose delta has been applied to the states, with numpy over whole arrays.

    Args:
        states: the requests' persistent state.
        num_groups: KV groups.
    """

    def __init__(self, states: RequestStates, num_groups: int) -> None:
        self._states = states
        self._num_groups = num_groups
        self._table_width = states.tokens.tensor.shape[1]
        self._shared: list[SharedPrefix] = []
        self._prefixes: tuple[PrefixGroup, ...] = ()

    def make(self, output: SchedulerOutput) -> StepLayout:
        """The layout of one step; notes that its sampled tokens will be there."""
        slots = self._states.slots_of(output.request_ids)
        starts = np.array(output.start_positions, np.int64)
        num_requests = len(slots)
        if sum(output.num_tokens) == num_requests:  # one token each
            ends, query_starts = starts + 1, np.arange(num_requests + 1)
            token_slots, positions = slots, starts
        else:
            counts = np.array(output.num_tokens, np.int64)
            ends, query_starts = starts + counts, np.concatenate(([0], np.cumsum(counts)))
            token_slots = np.repeat(slots, counts)
            positions = np.arange(len(token_slots)) + np.repeat(starts - query_starts[:-1], counts)
        last_rows = query_starts[1:] - 1
        sampled_slots, sampled_positions, sampled_rows = slots, ends, last_rows
        if len(output.sampled) < num_requests:
            sampled = np.array(output.sampled, np.int64)
            sampled_slots, sampled_positions, sampled_rows = slots[sampled], ends[sampled], last_rows[sampled]
        return StepLayout(
            slots=slots,
            ends=ends,
            query_starts=query_starts,
            positions=positions,
            places=token_slots * self._table_width + positions,
            slot_mappings=self._slot_mappings(token_slots, positions),
            sampled_ids=[output.request_ids[index] for index in output.sampled],
            sampled_slots=sampled_slots,
            sampled_positions=sampled_positions,
            sampled_rows=sampled_rows,
            sampled_places=self._states.note_sampled(sampled_slots, sampled_positions),
            prefixes=self._prefix_groups(output.shared_prefixes),
            prompt_rows=self._prompt_rows(output, slots, query_starts),
        )

    def _prefix_groups(self, shared: list[SharedPrefix]) -> tuple[PrefixGroup, ...]:
        """The same objects as long as the same is shared, which is mostly so while requests decode."""
        if shared != self._shared:
            self._shared, self._prefixes = shared, tuple(map(_prefix_group, shared))
        return self._prefixes

    def _slot_mappings(self, token_slots: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        size = self._states.block_size
        block, offset = np.divmod(positions, size)
        tables = (self._states.host_blocks(group) for group in range(self._num_groups))
        return [table[token_slots, block].astype(np.int64) * size + offset for table in tables]

    def _prompt_rows(
        self, output: SchedulerOutput, slots: np.ndarray, query_starts: np.ndarray
    ) -> list[PromptRows]:
        rows = []
        for index, request in self._states.prompt_logprobs_of(output.request_ids):
            start = output.start_positions[index]
            # the logits at position p are about the token at p + 1
            first = max(start, request.prompt_logprobs_from - 1)
            end = min(start + output.num_tokens[index], request.num_prompt_tokens - 1)
            if first < end:
                offset = int(query_starts[index]) - start
                target = int(slots[index]) * self._table_width + first + 1
                rows.append(PromptRows(request, first + offset, end + offset, target))
        return rows


def _prefix_group(prefix: SharedPrefix) -> PrefixGroup:
    return PrefixGroup(np.array(prefix.batch_indices, np.int32), prefix.num_blocks, prefix.first_block)
