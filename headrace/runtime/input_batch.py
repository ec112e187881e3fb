"""InputBatch: one step's layout as the tensors that the model and the sampler read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.attention.base import AttentionBackend
from headrace.attention.metadata import ForwardBatch, GroupBatch
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.runtime.request_states import RequestStates
from headrace.runtime.step_layout import StepLayout
from headrace.runtime.upload import upload


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """One step on the device. S requests sample.

    forward: the model's argument.
    sampled_rows: [S] int64, rows of the hidden states.
    sampled_places: [S] int64, where the tokens go in the flat token table.
    """

    forward: ForwardBatch
    sampled_rows: torch.Tensor
    sampled_places: torch.Tensor


class InputBatchBuilder:
    """Brings each step's layout to the device: one upload, then gathers from the persistent tables there.

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

    def build(self, step: StepLayout) -> InputBatch:
        """The batch of a step, in memory of its own."""
        arrays = [step.positions, step.places, step.slots, step.sampled_rows, step.sampled_places]
        on_device = upload([*arrays, *step.slot_mappings], self._device)
        positions, places, slots, sampled_rows, sampled_places = on_device[:5]
        forward = ForwardBatch(
            num_tokens=step.num_tokens,
            input_ids=self._states.tokens.take(step.places, places),
            positions=positions,
            groups=self._plan(step, slots, on_device[5:]),
        )
        return InputBatch(forward, sampled_rows, sampled_places)

    def _plan(
        self, step: StepLayout, slots: torch.Tensor, slot_mappings: Sequence[torch.Tensor]
    ) -> tuple[GroupBatch, ...]:
        """Each KV group's attention plan."""
        size = self._states.block_size
        num_blocks = -(-int(step.ends.max()) // size)
        groups = []
        for group, (spec, backend) in enumerate(zip(self._specs, self._backends, strict=True)):
            table = self._states.batch_blocks(group, step.slots, slots, num_blocks)
            plan = backend.plan(step.attention(spec, table, size))
            groups.append(GroupBatch(slot_mappings[group], plan))
        return tuple(groups)
