"""Sampling against a plain numpy oracle, against probabilities, and row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.kernels.reference.sampling import (
    log_normalizer,
    row_argmax,
    sample_rows,
    token_ranks,
    top_tokens,
)
from tests.runtime.sampling_oracle import kept_probabilities

VOCABS = [5, 100, 257, 1024, 3 * 128]


def run(
    logits: torch.Tensor, uniform: np.ndarray, temperature, top_k=None, top_p=None, min_p=None
) -> list[int]:
    rows = len(logits)
    row_max, _ = row_argmax(logits)

    def column(value, dtype):
        return None if value is None else torch.tensor(np.broadcast_to(value, rows).copy(), dtype=dtype)

    return sample_rows(
        logits,
        row_max,
        column(temperature, torch.float32),
        torch.from_numpy(uniform),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        0 if top_k is None else int(np.max(top_k)),
    ).tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_equal_the_numpy_oracle(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows, num_checked = 200, 0
    logits = (rng.normal(size=(rows, vocab)) * rng.uniform(0.1, 6, (rows, 1))).astype(np.float32)
    uniform = rng.random(rows)
    temperature = rng.uniform(0.2, 3, rows).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 5, 50, vocab], rows)
    top_p = rng.choice([1.0, 0.1, 0.5, 0.9, 0.99], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.01, 0.2, 1.0], rows).astype(np.float32)
    tokens = run(torch.from_numpy(logits), uniform, temperature, top_k, top_p, min_p)
    for row, token in enumerate(tokens):
        kept = kept_probabilities(
            logits[row], temperature[row], int(top_k[row]), float(top_p[row]), min_p[row]
        )
        cumulative = np.cumsum(kept)
        assert kept[token] > 0
        if np.abs(cumulative - uniform[row]).min() > 1e-5:  # else rounding may decide
            assert token == int(np.searchsorted(cumulative, uniform[row], side="right"))
            num_checked += 1
    assert num_checked > 0.9 * rows


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.15}, {"top_k": 4, "top_p": 0.8}]
)
def test_frequencies_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=8).astype(np.float32) * 1.5
    draws = 20_000
    tokens = run(torch.from_numpy(np.tile(logits, (draws, 1))), rng.random(draws), 0.8, **filters)
    expected = kept_probabilities(
        logits, 0.8, int(filters.get("top_k", 0)), filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    )
    counts = np.bincount(tokens, minlength=8)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = float(((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])).sum())
    assert chi_square < 27.9  # 7 degrees of freedom: p about 2e-4


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [100, 49152, 5003])
def test_rows_do_not_depend_on_their_batch(threads: int, vocab: int) -> None:
    rng = np.random.default_rng(vocab + threads)
    rows = 6
    logits = torch.from_numpy((rng.normal(size=(rows, vocab)) * 2).astype(np.float32))
    uniform = rng.random(rows)
    temperature = rng.uniform(0.5, 2, rows).astype(np.float32)
    top_k = rng.choice([0, 1, 40, 300], rows)
    top_p = rng.choice([1.0, 0.5, 0.95], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.01], rows).astype(np.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = run(logits, uniform, temperature, top_k, top_p, min_p)
        normalizers = log_normalizer(logits)
        for row in range(rows):
            one = slice(row, row + 1)
            alone = run(
                logits[one].clone(), uniform[one], temperature[one], top_k[one], top_p[one], min_p[one]
            )
            assert alone == whole[one]
            assert torch.equal(log_normalizer(logits[one].clone()), normalizers[one])
    finally:
        torch.set_num_threads(before)


def test_flat_distributions_reach_past_the_sorted_part() -> None:
    vocab = 4096
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(4, vocab)).astype(np.float32) * 0.1)
    uniform = np.array([0.0, 0.3, 0.7, 1.0 - 2.0**-53])
    tokens = run(logits, uniform, 1.0, top_p=0.8)
    for row, token in enumerate(tokens):
        kept = kept_probabilities(logits[row].numpy(), 1.0, 0, 0.8, 0.0)
        assert np.count_nonzero(kept) > 2000
        assert token == int(np.searchsorted(np.cumsum(kept), uniform[row], side="right"))


def test_ties_are_kept_at_every_threshold() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 0.0]]).repeat(400, 1)
    uniform = (np.arange(400) + 0.5) / 400
    assert set(run(logits, uniform, 1.0, top_k=1)) == {1, 2}
    assert set(run(logits, uniform, 1.0, top_k=3)) == {1, 2, 3, 4}
    assert set(run(logits, uniform, 1.0, top_p=0.1)) == {1, 2}
    assert set(run(logits, uniform, 1.0, min_p=1.0)) == {1, 2}


def test_the_smallest_set_that_holds_top_p_is_kept() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]])).repeat(100, 1)
    uniform = (np.arange(100) + 0.5) / 100
    assert set(run(logits, uniform, 1.0, top_p=0.49)) == {0}
    assert set(run(logits, uniform, 1.0, top_p=0.51)) == {0, 1}
    assert set(run(logits, uniform, 1.0, top_p=0.76)) == {0, 1, 2, 3}


def test_masked_and_extreme_values() -> None:
    logits = torch.tensor([[-torch.inf, 5.0, -torch.inf, 4.0]])
    for u in (0.0, 0.5, 1.0 - 2.0**-53):
        assert run(logits, np.array([u]), 1.0, top_p=0.9999)[0] in (1, 3)
        assert run(logits, np.array([u]), 1e-4) == [1]
    huge = torch.tensor([[3.0e38, -3.0e38, 2.9e38]])
    assert run(huge, np.array([0.999]), 1.0) == [0]
    only_last = torch.full((1, 700), -torch.inf)
    only_last[0, 699] = -50.0
    assert run(only_last, np.array([1.0 - 2.0**-53]), 2.0) == [699]
    assert run(only_last, np.array([0.0]), 2.0, top_k=5, top_p=0.5, min_p=0.1) == [699]


def test_rows_of_nan_give_some_valid_index_and_harm_no_other() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    uniform = np.array([0.2, 0.4, 0.6])
    good = run(logits, uniform, 1.0, top_k=300, top_p=0.9, min_p=0.01)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = logits.clone()
        spoiled[1] = bad
        tokens = run(spoiled, uniform, 1.0, top_k=300, top_p=0.9, min_p=0.01)
        assert tokens[0] == good[0] and tokens[2] == good[2] and 0 <= tokens[1] < 500


@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax_takes_the_lowest_index(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randint(0, 4, (50, vocab), generator=generator).float()
    values, indices = row_argmax(x)
    assert indices.tolist() == [row.index(max(row)) for row in x.tolist()]
    assert values.tolist() == [max(row) for row in x.tolist()]
    x[3, vocab // 2] = torch.nan
    assert torch.isnan(row_argmax(x)[0][3])


@pytest.mark.parametrize("vocab", VOCABS)
def test_log_probabilities_and_ranks(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(20, vocab, generator=generator) * 5
    tokens = torch.randint(0, vocab, (20,), generator=generator)
    exact = torch.log_softmax(logits.double(), -1)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(
        chosen - log_normalizer(logits), exact.gather(1, tokens[:, None])[:, 0].float(), atol=1e-5
    )
    expected = [1 + int((row > row[token]).sum()) for row, token in zip(logits, tokens, strict=True)]
    assert token_ranks(logits, chosen).tolist() == expected


def test_top_tokens_order_ties_by_index() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 5, (30, 40), generator=generator).float()
    for count in (1, 3, 20, 40):
        values, ids = top_tokens(logits, count)
        for row, row_ids, row_values in zip(logits.tolist(), ids.tolist(), values.tolist(), strict=True):
            expected = sorted(range(40), key=lambda token: (-row[token], token))[:count]
            assert row_ids == expected and row_values == [row[token] for token in expected]
