"""Persistent request state: slots, token table, block tables."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headrace.core.output import NewRequest, SchedulerOutput
from headrace.runtime.request_states import RequestStates
from headrace.sampling_params import SamplingParams

VOCAB = 100


def states(max_num_seqs: int = 4, num_groups: int = 2) -> RequestStates:
    return RequestStates(max_num_seqs, 40, num_groups, 4, VOCAB, torch.device("cpu"))


def new(request_id: str, tokens: list[int], blocks: list[list[int]], **params) -> NewRequest:
    return NewRequest(request_id, tokens, len(tokens), blocks, SamplingParams(**params), 0)


def test_random_comings_and_goings_match_a_plain_record() -> None:
    rng, table = random.Random(0), states()
    record: dict[str, tuple[list[int], list[list[int]]]] = {}
    for step in range(200):
        removed = [name for name in record if rng.random() < 0.3]
        for name in removed:
            del record[name]
        added = {f"r{step}.{i}": rng.sample(range(VOCAB), 5) for i in range(rng.randint(0, 4 - len(record)))}
        blocks = {name: [[rng.randrange(50)], [-1, rng.randrange(50)]] for name in added}
        grown = {name: [[rng.randrange(50)], []] for name in record if len(record[name][1][0]) < 8}
        appended = {name: [rng.randrange(VOCAB)] for name in record if len(record[name][0]) < 38}
        errors = table.apply(
            SchedulerOutput(
                step,
                new_requests=[new(name, tokens, blocks[name]) for name, tokens in added.items()],
                new_block_ids=grown,
                appended_token_ids=appended,
                removed_request_ids=removed,
            )
        )
        assert errors == {}
        for name, ids in grown.items():
            record[name][1][0].extend(ids[0])
        for name, ids in appended.items():
            record[name][0].extend(ids)
        record |= {
            name: (list(tokens), [list(ids) for ids in blocks[name]]) for name, tokens in added.items()
        }
        assert len(table) == len(record)
        slots = table.slots_of(list(record)).tolist()
        assert len(set(slots)) == len(slots)
        for slot, (tokens, group_blocks) in zip(slots, record.values(), strict=True):
            assert table.tokens.tensor[slot, : len(tokens)].tolist() == tokens
            for group, ids in enumerate(group_blocks):
                assert table.host_blocks(group)[slot, : len(ids)].tolist() == ids
                row = np.array([slot])
                assert table.batch_blocks(group, row, torch.from_numpy(row), len(ids)).tolist() == [ids]


def test_appended_tokens_follow_a_sampled_one() -> None:
    table = states()
    table.apply(SchedulerOutput(1, new_requests=[new("a", [1, 2], [[0], [1]])]))
    slots = table.slots_of(["a"])
    place = table.note_sampled(slots, slots * 0 + 2)
    table.tokens.tensor.view(-1)[torch.from_numpy(place)] = 77
    table.apply(SchedulerOutput(2, appended_token_ids={"a": [5, 6]}))
    assert table.tokens.tensor[int(slots[0]), :5].tolist() == [1, 2, 77, 5, 6]


def test_bad_token_ids_are_told_and_kept_harmless() -> None:
    table = states()
    requests = [new("a", [1, 2], [[0], [1]]), new("b", [3, VOCAB], [[2], [3]])]
    requests.append(new("c", [3], [[4], [5]], logit_bias={VOCAB: 1.0}))
    errors = table.apply(SchedulerOutput(1, new_requests=requests))
    assert set(errors) == {"b", "c"} and f"token id {VOCAB} of the prompt" in errors["b"]
    assert "logit_bias" in errors["c"]
    slot = int(table.slots_of(["b"])[0])
    assert table.tokens.tensor[slot, :2].tolist() == [3, 0]


def test_too_many_requests_and_double_ids_are_our_own_mistakes() -> None:
    table = states(max_num_seqs=1)
    table.apply(SchedulerOutput(1, new_requests=[new("a", [1], [[0], [1]])]))
    with pytest.raises(AssertionError, match="more than 1"):
        table.apply(SchedulerOutput(2, new_requests=[new("b", [1], [[0], [1]])]))
    with pytest.raises(AssertionError, match="known already"):
        table.apply(SchedulerOutput(3, new_requests=[new("a", [1], [[0], [1]])]))
