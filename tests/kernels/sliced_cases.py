"""A vocabulary in slices gives the picks of the whole: for the sampling functions of every kind of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CUTS = [(5, 2), (64, 4), (257, 2), (600, 3)]
"""(vocabulary, slices)"""


def slices_of(logits: torch.Tensor, count: int) -> Iterator[tuple[torch.Tensor, int]]:
    """(a slice with its own row stride, its first token); beyond it lie numbers that must not win."""
    num_rows, vocab = logits.shape
    width = -(-vocab // count)
    for first in range(0, vocab, width):
        own = logits[:, first : first + width]
        padded = logits.new_full((num_rows, width + 3), 1e9)
        padded[:, : own.shape[1]] = own
        yield padded[:, : own.shape[1]], first


def check_slices(sampling: Any, vocab: int, count: int, device: torch.device | str = "cpu") -> None:
    """Best and drawn tokens equal those of whole rows: of random logits, of ties, of rows that are broken."""
    generator = torch.Generator().manual_seed(vocab + count)
    logits = torch.randn(12, vocab, generator=generator)
    logits[4:8] = torch.randint(
        0, 3, (4, vocab), generator=generator
    ).float()  # ties within and across slices
    logits[8] = -torch.inf
    logits[9, : vocab - 1] = -torch.inf
    logits[10, vocab // 2] = torch.inf
    logits[11, vocab - 1] = torch.nan
    logits = logits.to(device)
    values, tokens = sampling.row_argmax(logits)
    found = [sampling.slice_argmax(part, first) for part, first in slices_of(logits, count)]
    assert all(each.shape == (2, 12) and each.dtype == torch.int32 for each in found)
    best, winners = sampling.best_candidates(torch.stack(found))
    assert torch.allclose(best, values, rtol=0, atol=0, equal_nan=True)
    assert winners.dtype == torch.int64 and torch.equal(winners, tokens)

    key = torch.randint(-(2**62), 2**62, (12,), generator=generator).to(device)
    temperature = (0.3 + 2 * torch.rand(12, generator=generator)).to(device)
    drawn = sampling.sample_rows(logits, values, temperature, key)
    found = [
        sampling.slice_race(part, values, temperature, key, first) for part, first in slices_of(logits, count)
    ]
    winners = sampling.best_candidates(torch.stack(found))[1]
    sound = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 9], device=device)
    assert torch.equal(winners[sound], drawn[sound])
    assert int(winners.min()) >= 0 and int(winners.max()) < vocab  # broken rows get valid tokens, too


def check_equal_candidates(sampling: Any, device: torch.device | str = "cpu") -> None:
    """Of equals the lowest token is taken, wherever it lies; NaN counts as largest; nobody's candidate loses."""
    rows = [
        ((2.0, 2.0, 1.0), (7, 12, 21), 7),
        ((1.0, 2.0, 2.0), (7, 12, 21), 12),
        ((1.0, torch.nan, torch.inf), (7, 12, 21), 12),
        ((-torch.inf, -torch.inf, -torch.inf), (3, 12, 0), None),
        ((0.0, -0.0, -torch.inf), (4, 12, 0), 4),
        ((0.0, 5.0, -torch.inf), (4, 12, 0), 12),
    ]
    values = torch.tensor([row[0] for row in rows], device=device).T.contiguous()
    tokens = torch.tensor([row[1] for row in rows], device=device, dtype=torch.int32).T
    found = sampling.best_candidates(torch.stack((values.view(torch.int32), tokens), dim=1))[1].tolist()
    for token, (_, candidates, expected) in zip(found, rows, strict=True):
        assert token in candidates if expected is None else token == expected
