"""Ranks that pick from parts of the vocabulary pick what one rank picks from all of it."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference import sampling
from headrace.parallel.state import ParallelState
from headrace.runtime.vocabulary_parts import VocabularyParts
from tests.parallel.thread_group import run_ranks

ROWS, VOCAB = 64, 120


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    logits[3] = 1.0  # all equal: the lowest id
    temperature = torch.rand(ROWS, generator=generator) + 0.2
    key = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator)
    return logits, temperature, key, (torch.arange(ROWS) % 2).int()


def pick(parallel: ParallelState, draws: bool) -> tuple[torch.Tensor, torch.Tensor]:
    logits, temperature, key, is_random = inputs()
    width = VOCAB // parallel.size
    parts = VocabularyParts(sampling, parallel.communicator.all_gather, parallel.rank, parallel.size, width)
    own = logits[:, parallel.rank * width : (parallel.rank + 1) * width].contiguous()
    return parts.pick(own, temperature, key, is_random if draws else None)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_same_tokens_as_from_the_whole_vocabulary(size: int, draws: bool) -> None:
    logits, temperature, key, is_random = inputs()
    best, tokens = sampling.row_argmax(logits)
    assert tokens[3] == 0
    if draws:
        drawn = sampling.sample_rows(logits, best, temperature, key)
        assert (drawn != tokens).sum() > 10
        tokens = torch.where(is_random > 0, drawn, tokens)
    for found, found_best in run_ranks(size, lambda parallel: pick(parallel, draws)):
        assert torch.equal(found, tokens) and torch.equal(found_best, best)


def test_rows_without_numbers_are_known_by_their_best() -> None:
    logits = inputs()[0]
    logits[5, 100] = torch.nan

    def work(parallel: ParallelState) -> torch.Tensor:
        parts = VocabularyParts(sampling, parallel.communicator.all_gather, parallel.rank, 2, VOCAB // 2)
        own = logits[:, parallel.rank * 60 : parallel.rank * 60 + 60].contiguous()
        return parts.pick(own, torch.ones(ROWS), torch.zeros(ROWS, dtype=torch.int64), None)[1]

    for best in run_ranks(2, work):
        assert best.isnan().tolist() == [row == 5 for row in range(ROWS)]
