"""The Triton sampling functions against a plain float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.reference import sampling as reference
from headrace.kernels.triton import sampling
from headrace.kernels.triton.sampling import (
    log_normalizer,
    row_argmax,
    sample_rows,
    token_ranks,
    top_tokens,
)
from tests.kernels.sliced_cases import CUTS, check_equal_candidates, check_slices
from tests.kernels.triton_setup import DEVICE
from tests.runtime.sampling_oracle import draw

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, of the interpreter

VOCABS = [5, 64, 257, 600]


def kept_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Probabilities after min_p, then top_k, then top_p, ties kept; 0 where removed."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights[weights < min_p] = 0.0
    if 0 < top_k < len(weights):
        weights[weights < np.sort(weights)[-top_k]] = 0.0
    weights /= weights.sum()
    if top_p < 1.0:
        falling = -np.sort(-weights)
        last = min(int(np.searchsorted(np.cumsum(falling), top_p)), len(weights) - 1)
        weights[weights < falling[last]] = 0.0
    return weights / weights.sum()


def some_keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)


def run(logits, keys, temperature, top_k=None, top_p=None, min_p=None) -> list[int]:
    logits = torch.as_tensor(logits, device=DEVICE)
    rows = len(logits)

    def column(value, dtype):
        if value is None:
            return None
        return torch.tensor(np.broadcast_to(value, rows).copy(), dtype=dtype, device=DEVICE)

    row_max, _ = row_argmax(logits)
    return sample_rows(
        logits,
        row_max,
        column(temperature, torch.float32),
        column(keys, torch.int64),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
    ).tolist()


def is_edge_clear(logits: np.ndarray, kept: np.ndarray, temperature: float, top_p: float) -> bool:
    """Whether the mass at the edge of the nucleus is further from top_p than rounding."""
    if top_p >= 1.0:
        return True
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    falling = -np.sort(-weights)
    for total in (weights.sum(), falling[: np.count_nonzero(kept)].sum()):
        if np.abs(np.cumsum(falling) / total - top_p).min() < 1e-5:
            return False
    return True


def compare(rows: int, vocab: int, seed: int) -> None:
    """Rows of all kinds against the oracle; where rounding may decide, any neighbour is right."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(rows, vocab)) * rng.uniform(0.01, 6, (rows, 1))).astype(np.float32)
    keys = some_keys(rows, seed)
    temperature = rng.uniform(0.2, 3, rows).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 5, 50, vocab], rows)
    top_p = rng.choice([1.0, 0.1, 0.5, 0.9, 0.99], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.01, 0.2, 1.0], rows).astype(np.float32)
    tokens = run(logits, keys, temperature, top_k, top_p, min_p)
    num_checked = 0
    for row, token in enumerate(tokens):
        kept = kept_probabilities(logits[row], temperature[row], top_k[row], top_p[row], min_p[row])
        expected, is_clear = draw(kept, int(keys[row]))
        if is_clear and is_edge_clear(logits[row], kept, temperature[row], top_p[row]):
            assert token == expected
            num_checked += 1
    assert num_checked > (0.7 if vocab < 2000 else 0.3) * rows


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_equal_the_oracle(vocab: int) -> None:
    compare(8, vocab, vocab)


def test_flat_distributions() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32) * 0.1
    keys = some_keys(2)
    for row, token in enumerate(run(logits, keys, 1.0, top_p=0.8)):
        kept = kept_probabilities(logits[row], 1.0, 0, 0.8, 0.0)
        assert token == draw(kept, int(keys[row]))[0]


def test_ties_are_kept_at_every_threshold() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 0.0]]).repeat(16, 1)
    keys = some_keys(16, 1)
    assert set(run(logits, keys, 1.0, top_k=1)) == {1, 2}
    assert set(run(logits, keys, 1.0, top_k=3)) == {1, 2, 3, 4}
    assert set(run(logits, keys, 1.0, top_p=0.1)) == {1, 2}
    assert set(run(logits, keys, 1.0, min_p=1.0)) == {1, 2}
    equal = torch.full((2, 300), 0.25)
    uniform = np.full(300, 1 / 300)
    assert run(equal, keys[:2], 1.0, top_k=7, top_p=0.5) == [draw(uniform, int(key))[0] for key in keys[:2]]


def test_masked_extreme_and_broken_values() -> None:
    logits = torch.tensor([[-torch.inf, 5.0, -torch.inf, 4.0]])
    for key in some_keys(5):
        assert run(logits, np.array([key]), 1.0, top_p=0.9999)[0] in (1, 3)
        assert run(logits, np.array([key]), 1e-4) == [1]
    assert run(torch.tensor([[3.0e38, -3.0e38, 2.9e38]]), some_keys(1), 1.0) == [0]
    only_last = torch.full((1, 150), -torch.inf)
    only_last[0, 149] = -50.0
    assert run(only_last, some_keys(1), 2.0) == [149]
    assert run(only_last, some_keys(1), 2.0, top_k=5, top_p=0.5, min_p=0.1) == [149]
    rows = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    good = run(rows, some_keys(3), 1.0, top_k=30, top_p=0.9, min_p=0.01)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = rows.clone()
        spoiled[1] = bad
        tokens = run(spoiled, some_keys(3), 1.0, top_k=30, top_p=0.9, min_p=0.01)
        assert tokens[0] == good[0] and tokens[2] == good[2] and 0 <= tokens[1] < 100


@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax_takes_the_lowest_index(vocab: int) -> None:
    x = torch.randint(0, 4, (8, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    values, ids = row_argmax(x.to(DEVICE))
    assert ids.tolist() == [row.index(max(row)) for row in x.tolist()]
    assert values.tolist() == [max(row) for row in x.tolist()]
    x[3, vocab // 2] = torch.nan
    assert torch.isnan(row_argmax(x.to(DEVICE))[0][3])


@pytest.mark.parametrize("vocab", VOCABS)
def test_log_probabilities_and_ranks(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(5, vocab, generator=generator) * 5).to(DEVICE)
    logits[0, 0] = -torch.inf
    tokens = torch.randint(1, vocab, (5, 1), generator=generator).to(DEVICE)
    exact = torch.log_softmax(logits.double(), -1).gather(1, tokens)
    chosen = logits.gather(1, tokens)
    assert torch.allclose(chosen - log_normalizer(logits)[:, None], exact.float(), atol=1e-5)
    expected = (logits > chosen).sum(-1) + 1
    assert torch.equal(token_ranks(logits, chosen[:, 0].contiguous()), expected)


def test_top_tokens_order_ties_by_index() -> None:
    logits = torch.randint(-3, 3, (4, 150), generator=torch.Generator().manual_seed(1)).float()
    logits[1] = torch.randn(150, generator=torch.Generator().manual_seed(2))
    logits[2, 3:] = -torch.inf
    for count in (1, 7, 20, 150):
        values, ids = top_tokens(logits.to(DEVICE), count)
        for row, row_ids, row_values in zip(logits.tolist(), ids.tolist(), values.tolist(), strict=True):
            expected = sorted(range(150), key=lambda token: (-row[token], token))[:count]
            assert row_ids == expected and row_values == [row[token] for token in expected]


def test_rows_do_not_depend_on_their_batch() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy((rng.normal(size=(4, 300)) * 2).astype(np.float32))
    keys, top_k = some_keys(4), np.array([0, 5, 300, 40])
    whole = run(logits, keys, 0.7, top_k, 0.9)
    for row in range(4):
        one = slice(row, row + 1)
        assert run(logits[one].clone(), keys[one], 0.7, top_k[one], 0.9) == whole[one]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 151936, 50257])
def test_large_vocabularies(vocab: int) -> None:
    compare(64, vocab, vocab)
    logits = torch.randn(8, vocab, device=DEVICE)
    values, ids = top_tokens(logits, 20)
    assert torch.equal(values, logits.sort(dim=-1, descending=True, stable=True).values[:, :20])
    assert torch.equal(values, logits.gather(1, ids))
    assert torch.equal(row_argmax(logits)[1], logits.argmax(-1))


@pytest.mark.parametrize(("vocab", "count"), CUTS)
def test_slices_give_the_picks_of_whole_rows(vocab: int, count: int) -> None:
    check_slices(sampling, vocab, count, DEVICE)


def test_of_equal_candidates_the_lowest_token_is_taken() -> None:
    check_equal_candidates(sampling, DEVICE)


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_race_of_a_slice_has_the_scores_of_the_reference(vocab: int) -> None:
    """Which decide between slices, so that ranks may not each have their own."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 2 * torch.randn(9, vocab, generator=generator)
    temperature = torch.rand(9, generator=generator) + 0.3
    args = logits, logits.amax(1) + 0.5, temperature, torch.from_numpy(some_keys(9))
    expected = reference.slice_race(*args, 1000)
    found = sampling.slice_race(*(each.to(DEVICE) for each in args), 1000).cpu()
    assert torch.equal(found[1], expected[1])
    scores = (each[0].view(torch.float32) for each in (found, expected))
    torch.testing.assert_close(*scores, rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4, 8])
def test_slices_of_a_large_vocabulary(count: int) -> None:
    check_slices(sampling, 128256, count, DEVICE)
