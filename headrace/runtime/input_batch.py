"""InputBatch: one step's requests in batch order, as the tensors that the model and the sampler read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.attention.base import AttentionBackend
from headrace.attention.metadata import AttentionMetadata, ForwardBatch, GroupBatch, PrefixGroup
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import NewRequest, SchedulerOutput, SharedPrefix
from headrace.runtime.request_states import RequestStates
from headrace.runtime.upload import upload


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
class InputBatch:
    """One step. T tokens, R requests, S of them sample.

    forward: the model's argument.
    sampled_ids: [S] request ids, in batch order.
    sampled_slots: [S] int64 on the host.
    sampled_positions: [S] int64 on the host, index of the token to be sampled in its sequence.
    sampled_rows: [S] int64 on the device, rows of the hidden states.
    sampled_places: [S] int64 on the device, where the tokens go in the flat token table.
    prompt_rows: of requests that want log-probabilities of their prompt.
    """

    forward: ForwardBatch
    sampled_ids: list[str]
    sampled_slots: np.ndarray
    sampled_positions: np.ndarray
    sampled_rows: torch.Tensor
    sampled_places: torch.Tensor
    prompt_rows: list[PromptRows]


class InputBatchBuilder:
    """Makes each step's InputBatch: numpy over whole arrays on the host, one upload, then gathers on the device.

    Args:
        states: the requests' persistent state.
        specs: the model's KV groups; backends: one planner for each.
        device: where the step runs.
    """

    def __init__(
        self,
        states: RequestStates,
        specs: Sequence[KVCacheSpec],
        backends: Sequence[AttentionBackend],
        device: torch.device,
    ) -> None:
        self._states = states
        self._specs = specs
        self._backends = backends
        self._device = device
        self._table_width = states.tokens.tensor.shape[1]

    def build(self, output: SchedulerOutput) -> InputBatch:
        """The batch of a step whose delta has been applied to the states."""
        step = self._lay_out(output)
        sampled = np.array(output.sampled, np.int64)
        sampled_slots, sampled_positions = step.slots[sampled], step.ends[sampled]
        places = step.token_slots * self._table_width + step.positions
        arrays = [
            step.positions,
            places,
            step.slots,
            step.query_starts[sampled + 1] - 1,
            self._states.note_sampled(sampled_slots, sampled_positions),
            *(self._slot_mapping(group, step) for group in range(len(self._specs))),
        ]
        on_device = upload(arrays, self._device)
        positions, device_places, device_slots, sampled_rows, sampled_places = on_device[:5]
        forward = ForwardBatch(
            num_tokens=len(step.positions),
            input_ids=self._states.tokens.take(places, device_places),
            positions=positions,
            groups=self._plan(output, step, device_slots, on_device[5:]),
        )
        return InputBatch(
            forward=forward,
            sampled_ids=[output.request_ids[index] for index in output.sampled],
            sampled_slots=sampled_slots,
            sampled_positions=sampled_positions,
            sampled_rows=sampled_rows,
            sampled_places=sampled_places,
            prompt_rows=self._prompt_rows(output, step),
        )

    def _lay_out(self, output: SchedulerOutput) -> _Layout:
        slots = self._states.slots_of(output.request_ids)
        starts = np.array(output.start_positions, np.int64)
        counts = np.array(output.num_tokens, np.int64)
        query_starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=query_starts[1:])
        total = int(query_starts[-1])
        if total == len(counts):  # one token each
            token_slots, positions = slots, starts
        else:
            token_slots = np.repeat(slots, counts)
            positions = np.arange(total) + np.repeat(starts - query_starts[:-1], counts)
        return _Layout(slots, starts + counts, query_starts, token_slots, positions)

    def _plan(
        self,
        output: SchedulerOutput,
        step: _Layout,
        device_slots: torch.Tensor,
        slot_mappings: Sequence[torch.Tensor],
    ) -> tuple[GroupBatch, ...]:
        """Each KV group's attention plan."""
        num_blocks = -(-int(step.ends.max()) // self._states.block_size)
        query_starts, context_lens = step.query_starts.astype(np.int32), step.ends.astype(np.int32)
        prefixes = tuple(_prefix_group(prefix) for prefix in output.shared_prefixes)
        groups = []
        for group, (spec, backend) in enumerate(zip(self._specs, self._backends, strict=True)):
            metadata = AttentionMetadata(
                query_starts=query_starts,
                context_lens=context_lens,
                block_table=self._states.batch_blocks(group, step.slots, device_slots, num_blocks),
                block_size=self._states.block_size,
                window=spec.window,
                shared_prefixes=prefixes if spec.window is None else (),
            )
            groups.append(GroupBatch(slot_mappings[group], backend.plan(metadata)))
        return tuple(groups)

    def _slot_mapping(self, group: int, step: _Layout) -> np.ndarray:
        """[T] int64: where each token's K and V go."""
        size = self._states.block_size
        blocks = self._states.host_blocks(group)[step.token_slots, step.positions // size]
        return blocks.astype(np.int64) * size + step.positions % size

    def _prompt_rows(self, output: SchedulerOutput, step: _Layout) -> list[PromptRows]:
        rows = []
        for index, request in self._states.prompt_logprobs_of(output.request_ids):
            start = output.start_positions[index]
            # the logits at position p are about the token at p + 1
            first = max(start, request.prompt_logprobs_from - 1)
            end = min(start + output.num_tokens[index], request.num_prompt_tokens - 1)
            if first < end:
                offset = int(step.query_starts[index]) - start
                target = int(step.slots[index]) * self._table_width + first + 1
                rows.append(PromptRows(request, first + offset, end + offset, target))
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where a step's tokens stand, on the host, int64.

    slots, ends: [R], each request's slot and its length after the step.  query_starts: [R+1].
    token_slots, positions: [T].
    """

    slots: np.ndarray
    ends: np.ndarray
    query_starts: np.ndarray
    token_slots: np.ndarray
    positions: np.ndarray


def _prefix_group(prefix: SharedPrefix) -> PrefixGroup:
    return PrefixGroup(np.array(prefix.batch_indices, np.int32), prefix.num_blocks, prefix.first_block)
