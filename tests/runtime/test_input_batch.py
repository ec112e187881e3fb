"""StepLayout and InputBatch against plain loops over requests and tokens."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.reference import ReferenceBackend
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import SchedulerOutput, SharedPrefix
from headrace.runtime.input_batch import InputBatch, InputBatchBuilder
from headrace.runtime.request_states import RequestStates
from headrace.runtime.step_layout import StepLayout, StepLayouts
from headrace.sampling_params import SamplingParams
from tests.runtime.step_maker import Sequence, StepMaker, describe

CPU = torch.device("cpu")
SPECS = [KVCacheSpec("full", (0,), 64), KVCacheSpec("sliding", (1,), 64, window=6)]
BLOCK = 4


class RecordingBackend(ReferenceBackend):
    """Keeps the metadata that it was asked to plan."""

    def __init__(self) -> None:
        super().__init__(AttentionShape(1, 1, 8), CPU)
        self.seen: list[AttentionMetadata] = []

    def plan(self, metadata: AttentionMetadata):
        self.seen.append(metadata)
        return super().plan(metadata)


def make_states(max_num_seqs: int = 8) -> RequestStates:
    return RequestStates(max_num_seqs, 60, len(SPECS), BLOCK, 1000, CPU)


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_match_plain_loops(seed: int) -> None:
    rng = random.Random(seed)
    states = make_states()
    layouts, backends = StepLayouts(states, len(SPECS)), [RecordingBackend() for _ in SPECS]
    builder = InputBatchBuilder(states, SPECS, backends, CPU)
    maker = StepMaker(400, BLOCK, len(SPECS), seed)
    sequences = [
        Sequence(f"r{i}", [rng.randrange(1000) for _ in range(rng.randint(1, 30))], SamplingParams())
        for i in range(8)
    ]
    for _ in range(12):
        batch = []
        for sequence in rng.sample(sequences, rng.randint(1, 8)):
            rest = len(sequence.token_ids) + sequence.num_placeholders - sequence.num_computed
            batch.append((sequence, rng.randint(1, rest)))
        output = maker.step(batch)
        output.shared_prefixes = [SharedPrefix([0, len(batch) - 1], 0)]
        states.apply(output)
        step = layouts.make(output)
        built = builder.build(step)
        check_step(output, batch, step, built, backends)
        for sequence, _ in batch:
            if sequence.num_placeholders:
                token = rng.randrange(1000)
                index = step.sampled_ids.index(sequence.request_id)
                states.tokens.tensor.view(-1)[built.sampled_places[index]] = token
                maker.take_in(sequence, [token])


def check_step(output: SchedulerOutput, batch, step: StepLayout, built: InputBatch, backends) -> None:
    input_ids, positions, rows = [], [], []
    slot_mappings: list[list[int]] = [[] for _ in SPECS]
    for index, (sequence, count) in enumerate(batch):
        start = output.start_positions[index]
        for position in range(start, start + count):
            input_ids.append(sequence.token_ids[position])
            positions.append(position)
            for group, mapping in enumerate(slot_mappings):
                block = sequence.blocks[group][position // BLOCK]
                mapping.append(block * BLOCK + position % BLOCK)
        if index in output.sampled:
            rows.append(len(input_ids) - 1)
    forward = built.forward
    assert forward.num_tokens == len(input_ids)
    assert forward.input_ids.dtype == forward.positions.dtype == torch.int64
    assert forward.input_ids.tolist() == input_ids and forward.positions.tolist() == positions
    assert built.sampled_rows.tolist() == step.sampled_rows.tolist() == rows
    assert built.sampled_places.tolist() == step.sampled_places.tolist()
    assert step.is_decode == (output.num_tokens == [1] * len(batch) and len(rows) == len(batch))
    assert step.sampled_ids == [output.request_ids[index] for index in output.sampled]
    ends = [start + count for start, count in zip(output.start_positions, output.num_tokens, strict=True)]
    assert step.sampled_positions.tolist() == [ends[index] for index in output.sampled]
    for group, spec in enumerate(SPECS):
        assert forward.groups[group].slot_mapping.dtype == torch.int64
        assert forward.groups[group].slot_mapping.tolist() == slot_mappings[group]
        metadata = backends[group].seen[-1]
        assert metadata.context_lens.tolist() == ends and metadata.window == spec.window
        assert metadata.query_starts.tolist() == [sum(output.num_tokens[:i]) for i in range(len(ends) + 1)]
        shared = [prefix.requests.tolist() for prefix in metadata.shared_prefixes]
        assert shared == ([[0, len(ends) - 1]] if spec.window is None else [])
        for row, (sequence, _), end in zip(metadata.block_table.tolist(), batch, ends, strict=True):
            needed = -(-end // BLOCK)
            assert row[:needed] == sequence.blocks[group][:needed]


def test_prompt_rows_name_positions_and_targets() -> None:
    states = make_states()
    layouts = StepLayouts(states, len(SPECS))
    maker = StepMaker(100, BLOCK, len(SPECS))
    plain = Sequence("a", list(range(5)), SamplingParams())
    scored = Sequence("b", list(range(20, 32)), SamplingParams(prompt_logprobs=1))
    output = maker.step([(plain, 5), (scored, 7)])
    output.new_requests[1].prompt_logprobs_from = 3
    states.apply(output)
    width = states.tokens.tensor.shape[1]
    slot = int(states.slots_of(["b"])[0])
    (rows,) = layouts.make(output).prompt_rows
    assert (rows.first_row, rows.end_row) == (5 + 2, 5 + 7)
    assert rows.first_target == slot * width + 3
    (rows,) = layouts.make(maker.step([(scored, 5)])).prompt_rows
    assert (rows.first_row, rows.end_row, rows.first_target) == (0, 4, slot * width + 8)
    assert layouts.make(maker.step([(scored, 1)])).prompt_rows == []
    again = maker.step([(plain, 1)])
    again.removed_request_ids = ["b"]
    states.apply(again)
    later = describe(scored)
    later.prompt_logprobs_from = scored.num_prompt
    output = SchedulerOutput(9, ["b"], [0], [12], [], [later])
    states.apply(output)
    assert layouts.make(output).prompt_rows == []
