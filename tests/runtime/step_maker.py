"""Makes scheduler outputs by hand: sequences with blocks of their own, a few tokens of each per step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from headrace.core.output import NewRequest, SchedulerOutput
from headrace.sampling_params import SamplingParams


@dataclass
class Sequence:
    """One request as the control plane sees it."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    sample_seed: int = 0
    child_index: int = 0
    num_computed: int = 0
    num_placeholders: int = 0
    is_known: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    num_prompt: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)


class StepMaker:
    """Hands out blocks in random order, and builds each step's delta."""

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1, seed: int = 0) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._step_id = 0
        self.removed: list[str] = []

    def step(self, batch: list[tuple[Sequence, int]], **delta) -> SchedulerOutput:
        """(sequence, number of tokens) pairs; those that reach their end sample."""
        self._step_id += 1
        output = SchedulerOutput(self._step_id, removed_request_ids=self.removed, **delta)
        output.new_requests, output.new_block_ids, output.sampled = [], {}, []
        output.request_ids, output.start_positions, output.num_tokens = [], [], []
        self.removed = []
        for sequence, count in batch:
            end = sequence.num_computed + count
            grown = self._grow(sequence, end)
            if not sequence.is_known:
                output.new_requests.append(describe(sequence))
                sequence.is_known = True
            elif any(grown):
                output.new_block_ids[sequence.request_id] = grown
            if end == len(sequence.token_ids) + sequence.num_placeholders:
                output.sampled.append(len(output.request_ids))
                sequence.num_placeholders += 1
            output.request_ids.append(sequence.request_id)
            output.start_positions.append(sequence.num_computed)
            output.num_tokens.append(count)
            sequence.num_computed = end
        return output

    def take_in(self, sequence: Sequence, tokens: list[int]) -> None:
        """Tokens of a finished step are known now."""
        sequence.token_ids += tokens
        sequence.num_placeholders -= len(tokens)

    def remove(self, sequence: Sequence) -> None:
        """Finished or preempted: its blocks are free from the next step on."""
        self.removed.append(sequence.request_id)
        self._free += [block for blocks in sequence.blocks for block in blocks]
        sequence.blocks, sequence.num_computed, sequence.is_known = [], 0, False

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[list[int]]:
        if not sequence.blocks:
            sequence.blocks = [[] for _ in range(self.num_groups)]
        needed = -(-num_tokens // self.block_size)
        grown = []
        for blocks in sequence.blocks:
            grown.append([self._free.pop() for _ in range(needed - len(blocks))])
            blocks += grown[-1]
        return grown


def describe(sequence: Sequence) -> NewRequest:
    """The sequence as the data plane gets it."""
    return NewRequest(
        sequence.request_id,
        list(sequence.token_ids),
        sequence.num_prompt,
        [list(blocks) for blocks in sequence.blocks],
        sequence.params,
        sequence.sample_seed,
        sequence.child_index,
        eos_token_ids=[0],
        prompt_logprobs_from=0
        if sequence.params.prompt_logprobs is None
        else max(1, sequence.params.logprobs_from),
    )
