"""Sampling against a plain numpy oracle, against probabilities, and row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.kernels.reference import sampling
from headrace.kernels.reference.noise import exponentials, keys_from
from headrace.kernels.reference.sampling import (
    log_normalizer,
    row_argmax,
    sample_rows,
    token_ranks,
    top_tokens,
)
from tests.kernels.sliced_cases import CUTS, check_equal_candidates, check_slices
from tests.runtime import sampling_oracle
from tests.runtime.sampling_oracle import draw, kept_probabilities

VOCABS = [5, 100, 257, 1024, 3 * 128]


def some_keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)


def run(logits: torch.Tensor, keys: np.ndarray, temperature, top_k=None, top_p=None, min_p=None) -> list[int]:
    rows = len(logits)
    row_max, _ = row_argmax(logits)

    def column(value, dtype):
        return None if value is None else torch.tensor(np.broadcast_to(value, rows).copy(), dtype=dtype)

    return sample_rows(
        logits,
        row_max,
        column(temperature, torch.float32),
        torch.from_numpy(keys),
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
    keys = some_keys(rows, vocab)
    temperature = rng.uniform(0.2, 3, rows).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 5, 50, vocab], rows)
    top_p = rng.choice([1.0, 0.1, 0.5, 0.9, 0.99], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.01, 0.2, 1.0], rows).astype(np.float32)
    tokens = run(torch.from_numpy(logits), keys, temperature, top_k, top_p, min_p)
    for row, token in enumerate(tokens):
        kept = kept_probabilities(
            logits[row], temperature[row], int(top_k[row]), float(top_p[row]), min_p[row]
        )
        assert kept[token] > 0
        expected, is_clear = draw(kept, int(keys[row]))
        if is_clear:
            assert token == expected
            num_checked += 1
    assert num_checked > 0.95 * rows


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.15}, {"top_k": 4, "top_p": 0.8}]
)
def test_frequencies_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=8).astype(np.float32) * 1.5
    draws = 20_000
    tokens = run(torch.from_numpy(np.tile(logits, (draws, 1))), some_keys(draws), 0.8, **filters)
    expected = kept_probabilities(
        logits, 0.8, int(filters.get("top_k", 0)), filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    )
    counts = np.bincount(tokens, minlength=8)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = float(((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])).sum())
    assert chi_square < 27.9  # 7 degrees of freedom: p about 2e-4


def test_frequencies_of_unlikely_tokens() -> None:
    """A flat tail of 20,000 tokens holds a tenth of the mass: the resolution of the noise must reach them all."""
    logits = np.full(20_001, np.log(0.1 / 20_000), np.float32)
    logits[7] = np.log(0.9)
    draws = 3000
    keys = some_keys(draws, 5)
    tokens = []
    for start in range(0, draws, 100):
        rows = torch.from_numpy(np.tile(logits, (100, 1)))
        tokens += run(rows, keys[start : start + 100], 1.0)
    tail = np.array([token for token in tokens if token != 7])
    assert abs(len(tail) - 0.1 * draws) < 4 * np.sqrt(draws * 0.09)
    assert len(np.unique(tail)) > 0.95 * len(tail) and abs(tail.mean() - 10_000) < 4 * 5774 / np.sqrt(
        len(tail)
    )


def test_tiny_changes_of_logits_do_not_change_tokens() -> None:
    rng = np.random.default_rng(8)
    logits = (rng.normal(size=(200, 20_000)) * 0.5).astype(np.float32)
    nudged = (logits + rng.normal(size=logits.shape) * 1e-6).astype(np.float32)
    keys = some_keys(200)
    before = run(torch.from_numpy(logits), keys, 1.0)
    assert run(torch.from_numpy(nudged), keys, 1.0) == before


def test_noise_is_the_oracles() -> None:
    keys = some_keys(6)
    noise = exponentials(torch.from_numpy(keys), 5000).numpy()
    for row, key in enumerate(keys.tolist()):
        exact = sampling_oracle.exponentials(key, 5000)
        assert np.allclose(noise[row][exact < 1], exact[exact < 1], rtol=1e-6, atol=0)
        assert np.allclose(np.exp(-noise[row]), np.exp(-exact), rtol=0, atol=2e-7)
    assert noise.min() > 0 and abs(noise.mean() - 1) < 0.03 and abs(np.median(noise) - np.log(2)) < 0.02
    assert abs(np.corrcoef(noise)[np.triu_indices(6, 1)]).max() < 0.06


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [100, 49152, 5003])
def test_rows_do_not_depend_on_their_batch(threads: int, vocab: int) -> None:
    rng = np.random.default_rng(vocab + threads)
    rows = 6
    logits = torch.from_numpy((rng.normal(size=(rows, vocab)) * 2).astype(np.float32))
    keys = some_keys(rows)
    temperature = rng.uniform(0.5, 2, rows).astype(np.float32)
    top_k = rng.choice([0, 1, 40, 300], rows)
    top_p = rng.choice([1.0, 0.5, 0.95], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.01], rows).astype(np.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = run(logits, keys, temperature, top_k, top_p, min_p)
        normalizers = log_normalizer(logits)
        for row in range(rows):
            one = slice(row, row + 1)
            alone = run(logits[one].clone(), keys[one], temperature[one], top_k[one], top_p[one], min_p[one])
            assert alone == whole[one]
            assert torch.equal(log_normalizer(logits[one].clone()), normalizers[one])
    finally:
        torch.set_num_threads(before)


def test_flat_distributions_reach_past_the_sorted_part() -> None:
    vocab = 4096
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(4, vocab)).astype(np.float32) * 0.1)
    keys = some_keys(4)
    tokens = run(logits, keys, 1.0, top_p=0.8)
    for row, token in enumerate(tokens):
        kept = kept_probabilities(logits[row].numpy(), 1.0, 0, 0.8, 0.0)
        assert np.count_nonzero(kept) > 2000
        assert token == draw(kept, int(keys[row]))[0]


def test_ties_are_kept_at_every_threshold() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 0.0]]).repeat(400, 1)
    keys = some_keys(400)
    assert set(run(logits, keys, 1.0, top_k=1)) == {1, 2}
    assert set(run(logits, keys, 1.0, top_k=3)) == {1, 2, 3, 4}
    assert set(run(logits, keys, 1.0, top_p=0.1)) == {1, 2}
    assert set(run(logits, keys, 1.0, min_p=1.0)) == {1, 2}


def test_the_smallest_set_that_holds_top_p_is_kept() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]])).repeat(100, 1)
    keys = some_keys(100)
    assert set(run(logits, keys, 1.0, top_p=0.49)) == {0}
    assert set(run(logits, keys, 1.0, top_p=0.51)) == {0, 1}
    assert set(run(logits, keys, 1.0, top_p=0.76)) == {0, 1, 2, 3}


def test_masked_and_extreme_values() -> None:
    logits = torch.tensor([[-torch.inf, 5.0, -torch.inf, 4.0]])
    for key in some_keys(20):
        assert run(logits, np.array([key]), 1.0, top_p=0.9999)[0] in (1, 3)
        assert run(logits, np.array([key]), 1e-4) == [1]
    huge = torch.tensor([[3.0e38, -3.0e38, 2.9e38]])
    assert run(huge, some_keys(1), 1.0) == [0]
    only_last = torch.full((1, 700), -torch.inf)
    only_last[0, 699] = -50.0
    assert run(only_last, some_keys(1), 2.0) == [699]
    assert run(only_last, some_keys(1), 2.0, top_k=5, top_p=0.5, min_p=0.1) == [699]


def test_rows_of_nan_give_some_valid_index_and_harm_no_other() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    keys = some_keys(3)
    good = run(logits, keys, 1.0, top_k=300, top_p=0.9, min_p=0.01)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = logits.clone()
        spoiled[1] = bad
        tokens = run(spoiled, keys, 1.0, top_k=300, top_p=0.9, min_p=0.01)
        assert tokens[0] == good[0] and tokens[2] == good[2] and 0 <= tokens[1] < 500


@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax_takes_the_lowest_index(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randint(0, 4, (50, vocab), generator=generator).float()
    values, indices = row_argmax(x)
    assert indices.tolist() == [row.index(max(row)) for row in x.tolist()]
    assert values.tolist() == [max(row) for row in x.tolist()]
    for row in range(3):
        value, index = row_argmax(x[row : row + 1])
        assert (value.item(), index.item()) == (values[row].item(), indices[row].item())
    x[3, vocab // 2] = torch.nan
    assert torch.isnan(row_argmax(x)[0][3])
    assert torch.isnan(row_argmax(x[3:4])[0][0])


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


@pytest.mark.parametrize(("vocab", "count"), CUTS)
def test_slices_give_the_picks_of_whole_rows(vocab: int, count: int) -> None:
    check_slices(sampling, vocab, count)


def test_of_equal_candidates_the_lowest_token_is_taken() -> None:
    check_equal_candidates(sampling)


def test_noise_can_begin_at_any_token() -> None:
    keys = torch.from_numpy(some_keys(20, 3))
    whole = exponentials(keys, 500)
    assert torch.equal(exponentials(keys_from(keys, 123), 300), whole[:, 123:423])
    tokens = torch.arange(20) * 24
    assert torch.equal(exponentials(keys_from(keys, tokens), 1)[:, 0], whole.gather(1, tokens[:, None])[:, 0])
    far = 150_000 * torch.ones(20, dtype=torch.int64)
    assert torch.equal(exponentials(keys_from(keys, far), 2), exponentials(keys, 150_002)[:, -2:])
