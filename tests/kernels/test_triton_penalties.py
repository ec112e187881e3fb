"""Triton penalties against a plain loop over tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.penalties import apply_penalties
from tests.kernels.triton_setup import DEVICE


def penalized(row: list[float], tokens: list[int], num_prompt: int, repeat: float, often: float, seen: float):
    result = list(row)
    output = tokens[num_prompt:]
    for token in set(tokens):
        value = row[token] / repeat if row[token] > 0 else row[token] * repeat
        count = output.count(token)
        result[token] = value - often * count - seen * (count > 0)
    return result


def check(num_rows: int, vocab: int, longest: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(num_rows + 2, vocab, generator=generator)
    table = torch.randint(
        0, min(vocab, 50), (num_rows + 3, longest + 9), generator=generator, dtype=torch.int32
    )
    rows = torch.randperm(num_rows + 2, generator=generator)[:num_rows]
    slots = torch.randperm(num_rows + 3, generator=generator)[:num_rows]
    lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator)
    prompts = torch.minimum(torch.randint(0, longest, (num_rows,), generator=generator), lengths)
    repetition = torch.rand(num_rows, generator=generator) + 0.5
    frequency, presence = torch.rand(2, num_rows, generator=generator)
    expected = logits.clone()
    for index in range(num_rows):
        row, length = int(rows[index]), int(lengths[index])
        tokens = table[slots[index], :length].tolist()
        settings = (float(x[index]) for x in (repetition, frequency, presence))
        expected[row] = torch.tensor(penalized(logits[row].tolist(), tokens, int(prompts[index]), *settings))
    found = torch.empty_like(logits, device=DEVICE)
    tensors = [x.to(DEVICE) for x in (table, rows, slots, lengths, prompts)]
    settings = [x.to(DEVICE) for x in (repetition, frequency, presence)]
    for _ in range(2):  # the counts are taken out again, so a second call sees none
        found.copy_(logits)
        apply_penalties(found, *tensors, int(lengths.max()), *settings)
        assert torch.allclose(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_penalties() -> None:
    check(4, 60, 150)
    check(1, 40, 1)


@pytest.mark.gpu
def test_large() -> None:
    check(200, 128256, 3000)
