"""Logit processors one by one; mixes of them are compared with an oracle in test_sampler."""

from __future__ import annotations

import pytest
import torch

from headrace.runtime import row_parts as row_parts_module
from headrace.runtime.penalties import (
    AllowedTokens,
    BannedSequences,
    BannedTokens,
    GrammarMask,
    LogitBias,
    Penalties,
)

V = 40


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def changed(before: torch.Tensor, after: torch.Tensor) -> list[tuple[int, int]]:
    return [tuple(place) for place in (before != after).nonzero().tolist()]


def test_sparse_processors_touch_nothing_else() -> None:
    before = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    after = before.clone()
    LogitBias(ints(1, 1, 3), ints(5, 6, 5), torch.tensor([1.0, -2.0, 50.0])).apply(after)
    BannedTokens(ints(0, 2, 2), ints(39, 0, 0)).apply(after)
    assert changed(before, after) == [(0, 39), (1, 5), (1, 6), (2, 0), (3, 5)]
    assert float(after[3, 5] - before[3, 5]) == pytest.approx(50.0)


def test_allowed_tokens() -> None:
    after = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    before = after.clone()
    AllowedTokens(ints(0, 2), ints(0, 2, 2), ints(7, 1, 39)).apply(after)
    assert torch.isfinite(after).nonzero().tolist() == [[0, 7], *[[1, v] for v in range(V)], [2, 1], [2, 39]]
    assert after[2, 39] == before[2, 39]


def test_grammar_mask_of_single_bits() -> None:
    logits = torch.zeros(3, V)
    words = torch.tensor([[1 << 4, -(1 << 31)]], dtype=torch.int32)
    GrammarMask(ints(1), words).apply(logits)
    assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == [4]
    words = torch.tensor([[-(1 << 31), 1]], dtype=torch.int32)
    GrammarMask(ints(2), words).apply(logits)
    assert torch.isfinite(logits[2]).nonzero()[:, 0].tolist() == [31, 32]
    assert torch.isfinite(logits[0]).all()


def test_sequences_that_end_alike() -> None:
    table = torch.tensor([[1, 2, 3, 4, 0], [9, 9, 9, 9, 0]], dtype=torch.int32)
    logits = torch.zeros(2, V)
    # row 0 has generated 2 3 4: "3 4 -> 7" matches, "2 4 -> 7" and "4 4 -> 8" do not
    processor = BannedSequences(
        table,
        rows=ints(0, 0, 0, 1),
        slots=ints(0, 0, 0, 1),
        starts=ints(2, 2, 2, 3),
        prefixes=torch.tensor([[3, 4], [2, 4], [4, 4], [9, -1]], dtype=torch.int32),
        last_tokens=ints(7, 7, 8, 7),
    )
    processor.apply(logits)
    assert torch.isinf(logits).nonzero().tolist() == [[0, 7], [1, 7]]


def test_penalties_count_the_answer_and_see_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(row_parts_module._PART_BYTES, "cpu", 4 * V)  # one row at a time
    table = torch.tensor([[1, 2, 2, 3, 3, 3, 9], [4, 5, 0, 0, 0, 0, 9]], dtype=torch.int32)
    logits = torch.ones(3, V)
    logits[0, 2] = -1.0
    processor = Penalties(
        table,
        rows=ints(0, 2),
        slots=ints(0, 1),
        lengths=ints(6, 2),
        num_prompt_tokens=ints(2, 2),
        max_length=6,
        repetition=torch.tensor([2.0, 4.0]),
        frequency=torch.tensor([0.5, 1.0]),
        presence=torch.tensor([0.25, 1.0]),
    )
    processor.apply(logits)
    assert logits[0, :5].tolist() == [1.0, 0.5, -2.0 - 0.5 - 0.25, 0.5 - 1.5 - 0.25, 1.0]
    assert logits[1].tolist() == [1.0] * V
    assert logits[2, :7].tolist() == [1.0, 1.0, 1.0, 1.0, 0.25, 0.25, 1.0]
    assert logits[:, 9].tolist() == [1.0] * 3, "what stands after the end is not seen"
