"""RequestStates: what the device remembers of every request between steps, by slot and not by batch order."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from headrace.core.output import NewRequest, SchedulerOutput
from headrace.runtime.device_table import DeviceTable, Write
from headrace.runtime.sampling_states import SamplingStates, find_token_error
from headrace.sampling_params import SamplingParams


class RequestStates:
    """Tokens, block tables and sampling parameters of up to ``max_num_seqs`` requests.

    Attributes:
        tokens: [max_num_seqs + 1, max_model_len + 1] int32; sampled tokens are written on the device, so the next step
            can read them before the host knows them.
        sampling: the sampling parameters.

    Args:
        max_num_seqs: slots.
        max_model_len: the longest sequence, in tokens.
        num_groups: KV groups, each with a block table of its own.
        block_size: tokens in a block.
        vocab_size: width of the logits.
        device: where the tables live.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        num_groups: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        # The last row belongs to no request.
        self.tokens = DeviceTable(max_num_seqs + 1, max_model_len + 1, device)
        self.sampling = SamplingStates(max_num_seqs, vocab_size, device)
        self._vocab_size = vocab_size
        self._num_groups = num_groups
        max_blocks = -(-(max_model_len + 1) // block_size)
        # One table for all groups: the rows of group g are [g * max_num_seqs, (g + 1) * max_num_seqs).
        self._blocks = DeviceTable(num_groups * max_num_seqs, max_blocks, device, keep_host_copy=True)
        self._max_num_seqs = max_num_seqs
        self._num_blocks = np.zeros((num_groups, max_num_seqs), np.int64)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._prompt_logprobs: dict[str, NewRequest] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def apply(self, output: SchedulerOutput) -> dict[str, str]:
        """Bring the states up to date with a step's delta.

        Returns:
            {request id: message} of new requests whose token ids do not fit the vocabulary. They are kept with
            harmless values, since steps may have them in flight.
        """
        for request_id in output.removed_request_ids:
            self._free_slots.append(self._slots.pop(request_id))
            self._prompt_logprobs.pop(request_id, None)
        errors: dict[str, str] = {}
        tokens: list[Write] = []
        blocks: list[Write] = []
        for new in output.new_requests:
            message = find_token_error(new, self._vocab_size)
            if message is not None:
                errors[new.request_id] = message
                new = _harmless(new, self._vocab_size)
            self._add(new, tokens, blocks)
        for request_id, group_blocks in output.new_block_ids.items():
            self._append_blocks(self._slots[request_id], group_blocks, blocks)
        for request_id, count in output.kept_tokens.items():
            self._num_tokens[self._slots[request_id]] = count
        for request_id, token_ids in output.appended_token_ids.items():
            slot = self._slots[request_id]
            tokens.append((slot, int(self._num_tokens[slot]), token_ids))
            self._num_tokens[slot] += len(token_ids)
        if tokens:
            self.tokens.write(tokens)
        if blocks:
            self._blocks.write(blocks)
        return errors

    def slots_of(self, request_ids: Sequence[str]) -> np.ndarray:
        """[R] int64: the slot of each request."""
        slots = self._slots
        return np.array([slots[request_id] for request_id in request_ids], np.int64)

    def prompt_logprobs_of(self, request_ids: Sequence[str]) -> list[tuple[int, NewRequest]]:
        """(batch index, request) of those that want log-probabilities of their prompt."""
        wanted = self._prompt_logprobs
        if not wanted:
            return []
        return [(index, wanted[name]) for index, name in enumerate(request_ids) if name in wanted]

    def host_blocks(self, group: int) -> np.ndarray:
        """[max_num_seqs, max_blocks] int32 on the host: one group's block table."""
        assert self._blocks.host is not None
        start = group * self._max_num_seqs
        return self._blocks.host[start : start + self._max_num_seqs]

    def batch_blocks(
        self, group: int, slots: np.ndarray, device_slots: torch.Tensor, num_blocks: int
    ) -> torch.Tensor:
        """[R, num_blocks] int32 on the device: the beginning of the slots' rows of one group's block table."""
        offset = group * self._max_num_seqs
        return self._blocks.take_rows(
            slots + offset, device_slots + offset if offset else device_slots, num_blocks
        )

    @property
    def batch_blocks_width(self) -> int:
        """Blocks of the longest sequence."""
        return self._blocks.tensor.shape[1]

    @property
    def unread_place(self) -> int:
        """A place in the flat token table that belongs to no request."""
        return self._max_num_seqs * self.tokens.tensor.shape[1]

    def gather_blocks(self, group: int, device_slots: torch.Tensor, out: torch.Tensor) -> None:
        """Write the slots' whole rows of one group's block table to ``out`` [R, max_blocks] int32; device work only."""
        start = group * self._max_num_seqs
        table = self._blocks.tensor[start : start + self._max_num_seqs]
        torch.index_select(table, 0, device_slots, out=out)

    def note_sampled(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Record that a token is put at each position; [R] int64, the places in the flat token table.

        A sequence ends at its newest token: what the table holds after it is of no account.
        """
        self._num_tokens[slots] = positions + 1
        return slots * self.tokens.tensor.shape[1] + positions

    def _add(self, new: NewRequest, tokens: list[Write], blocks: list[Write]) -> None:
        assert new.request_id not in self._slots, f"request {new.request_id!r} is known already"
        assert self._free_slots, f"more than {self._max_num_seqs} requests at once"
        slot = self._free_slots.pop()
        self._slots[new.request_id] = slot
        self._num_blocks[:, slot] = 0
        self._num_tokens[slot] = len(new.token_ids)
        tokens.append((slot, 0, new.token_ids))
        self._append_blocks(slot, new.block_ids, blocks)
        self.sampling.add(slot, new)
        if new.sampling_params.prompt_logprobs is not None and new.prompt_logprobs_from:
            self._prompt_logprobs[new.request_id] = new

    def _append_blocks(self, slot: int, group_blocks: list[list[int]], blocks: list[Write]) -> None:
        assert len(group_blocks) == self._num_groups, f"{len(group_blocks)} groups for {self._num_groups}"
        for group, ids in enumerate(group_blocks):
            if ids:
                start = int(self._num_blocks[group, slot])
                blocks.append((group * self._max_num_seqs + slot, start, ids))
                self._num_blocks[group, slot] = start + len(ids)


def _harmless(new: NewRequest, vocab_size: int) -> NewRequest:
    """The request with valid tokens and plain sampling; its results are discarded."""
    token_ids = [token if 0 <= token < vocab_size else 0 for token in new.token_ids]
    return msgspec.structs.replace(new, token_ids=token_ids, sampling_params=SamplingParams())
