"""Sampler with SamplingStates: equal to the naive oracle, row by row, for any mix of parameters."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headrace.core.output import NewRequest
from headrace.core.token_mask import TokenMask
from headrace.runtime.sampler import PackedTokens, Sampler, SamplerOutput
from headrace.runtime.sampling_states import SamplingStates, find_token_error
from headrace.sampling_params import SamplingParams
from tests.runtime import sampling_oracle

CPU = torch.device("cpu")


class Bench:
    """Requests in slots (not in batch order) with their token table."""

    def __init__(self, requests: list[NewRequest], vocab_size: int, width: int = 64) -> None:
        self.requests = requests
        self.states = SamplingStates(len(requests) + 3, vocab_size, CPU)
        self.table = torch.full((len(requests) + 3, width), 1, dtype=torch.int32)
        self.slots = np.arange(len(requests))[::-1] + 2
        for request, slot in zip(requests, self.slots.tolist(), strict=True):
            self.states.add(slot, request)
            self.table[slot, : len(request.token_ids)] = torch.tensor(request.token_ids, dtype=torch.int32)

    def sample(self, logits: np.ndarray, rows: list[int], mask: np.ndarray | None = None) -> SamplerOutput:
        positions = np.array([len(self.requests[row].token_ids) for row in rows], np.int64)
        batch = self.states.make_batch(
            self.slots[rows], positions, self.table, None if mask is None else constrained(mask[rows])
        )
        return Sampler()(torch.from_numpy(logits[rows]), batch)


def constrained(mask: np.ndarray) -> TokenMask | None:
    """The rows of a dense mask that forbid anything."""
    rows = np.flatnonzero((mask != 0xFFFFFFFF).any(1))
    return TokenMask(rows, mask[rows]) if len(rows) else None


def request(
    index: int = 0, tokens: list[int] | None = None, num_prompt: int | None = None, **params
) -> NewRequest:
    tokens = tokens or [1, 2, 3]
    return NewRequest(
        f"r{index}",
        tokens,
        len(tokens) if num_prompt is None else num_prompt,
        [[0]],
        SamplingParams(**params),
        sample_seed=index * 7919 + 13,
        child_index=index % 3,
        eos_token_ids=[0],
    )


def random_request(rng: random.Random, index: int, vocab: int) -> NewRequest:
    def maybe(value, default=None):
        return value if rng.random() < 0.35 else default

    tokens = [rng.randrange(vocab) for _ in range(rng.randint(2, 30))]
    num_prompt = rng.randint(1, len(tokens))
    output = tokens[num_prompt:]
    word = [*output[-2:], rng.randrange(vocab)]
    return request(
        index,
        tokens,
        num_prompt,
        temperature=rng.choice([0.0, 1e-7, 0.3, 1.0, 2.5]),
        top_k=maybe(rng.choice([1, 2, 7, vocab, 10**6]), 0),
        top_p=maybe(rng.choice([0.05, 0.5, 0.95]), 1.0),
        min_p=maybe(rng.choice([0.01, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 3), 1.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(vocab): rng.uniform(-100, 100) for _ in range(4)}),
        allowed_token_ids=maybe(rng.sample(range(vocab), 6)),
        min_tokens=maybe(rng.randint(1, 16), 0),
        stop_token_ids=maybe(rng.sample(range(vocab), 3)),
        bad_word_ids=maybe([word, [rng.randrange(vocab)], [*output[-1:], rng.randrange(vocab)]]),
        logprobs=maybe(rng.choice([0, 3, 20, -1])),
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_mixes_equal_the_oracle_alone_and_in_any_batch(seed: int) -> None:
    rng, vocab, count = random.Random(seed), 70, 60
    requests = [random_request(rng, index, vocab) for index in range(count)]
    noise = np.random.default_rng(seed)
    logits = (noise.normal(size=(count, vocab)) * 3).astype(np.float32)
    mask = np.full((count, 3), 0xFFFFFFFF, np.uint32)
    mask[::5] = noise.integers(0, 1 << 32, (len(mask[::5]), 3), dtype=np.uint64).astype(
        np.uint32
    ) | np.uint32(1)
    bench = Bench(requests, vocab)
    whole = bench.sample(logits, list(range(count)), mask)
    tokens, is_finite = whole.token_ids.tolist(), torch.isfinite(whole.best_logits).tolist()
    num_checked = 0
    for row, new in enumerate(requests):
        final = sampling_oracle.processed_logits(logits[row], new, new.token_ids, mask[row])
        assert is_finite[row] == np.isfinite(final.max())
        if is_finite[row]:
            expected, is_sure = sampling_oracle.sample(logits[row], new, new.token_ids, mask[row])
            assert not is_sure or tokens[row] == expected, new
            num_checked += is_sure
        alone = bench.sample(logits, [row], mask)
        assert alone.token_ids.tolist() == [tokens[row]]
    assert num_checked > 0.8 * count
    order = rng.sample(range(count), 25)
    part = bench.sample(logits, order, mask)
    assert part.token_ids.tolist() == [tokens[row] for row in order]


def test_logprobs_are_of_the_raw_logits() -> None:
    vocab = 50
    logits = np.random.default_rng(1).normal(size=(4, vocab)).astype(np.float32) * 3
    requests = [
        request(0, temperature=0.0, logprobs=3, logit_bias={7: 100.0}),
        request(1, temperature=0.0),
        request(2, temperature=2.0, logprobs=0, frequency_penalty=1.0),
        request(3, temperature=0.0, logprobs=-1, allowed_token_ids=[4]),
    ]
    mask = np.full((4, 2), 0xFFFFFFFF, np.uint32)
    output = Bench(requests, vocab).sample(logits.copy(), [0, 1, 2, 3], mask)
    tokens = output.token_ids.tolist()
    assert tokens[0] == 7 and tokens[3] == 4 and output.logprobs is not None
    entries = output.logprobs.to_host()
    exact = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    for entry, row, num_top in zip(entries, (0, 2, 3), (3, 0, vocab), strict=True):
        order = np.argsort(-exact[row], kind="stable")[:num_top]
        assert entry.token_ids == [tokens[row], *order.tolist()]
        assert entry.logprobs == pytest.approx([exact[row][token] for token in entry.token_ids], abs=1e-5)
        assert entry.rank == 1 + int((exact[row] > exact[row][tokens[row]]).sum())


def test_all_rows_with_logprobs_keep_the_raw_logits_too() -> None:
    logits = np.random.default_rng(2).normal(size=(2, 40)).astype(np.float32)
    bench = Bench([request(i, temperature=0.0, logprobs=1, logit_bias={i: 50.0}) for i in range(2)], 40)
    output = bench.sample(logits.copy(), [0, 1])
    assert output.token_ids.tolist() == [0, 1] and output.logprobs is not None
    exact = torch.log_softmax(torch.from_numpy(logits), -1)
    assert [entry.logprobs[0] for entry in output.logprobs.to_host()] == pytest.approx(
        [float(exact[0, 0]), float(exact[1, 1])], abs=1e-5
    )


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.zeros((1, 300), np.float32)
    logits[0, [40, 200, 299]] = 2.0
    assert Bench([request(temperature=0.0)], 300).sample(logits, [0]).token_ids.tolist() == [40]


def test_same_seed_same_token_and_other_positions_children_seeds_differ() -> None:
    vocab, rows = 997, 12
    logits = np.zeros((rows, vocab), np.float32)
    requests = [request(0) for _ in range(rows)]
    requests[1].sample_seed += 1
    requests[2].child_index += 1
    requests[3].token_ids = [1, 2, 3, 4]
    tokens = Bench(requests, vocab).sample(logits, list(range(rows))).token_ids.tolist()
    assert len(set(tokens[:4])) == 4
    assert set(tokens[4:]) == {tokens[0]}


def test_draws_follow_the_distribution_over_positions() -> None:
    vocab, draws = 6, 6000
    logits = np.tile(np.array([0.0, 1.0, 2.0, -1.0, 0.5, 1.5], np.float32), (draws, 1))
    states = SamplingStates(1, vocab, CPU)
    states.add(0, request(0, temperature=1.0))
    positions = np.arange(draws, dtype=np.int64)
    batch = states.make_batch(np.zeros(draws, np.int64), positions, torch.zeros((1, 8), dtype=torch.int32))
    counts = np.bincount(Sampler()(torch.from_numpy(logits), batch).token_ids.numpy(), minlength=vocab)
    expected = draws * sampling_oracle.kept_probabilities(logits[0].astype(np.float64), 1.0, 0, 1.0, 0.0)
    assert float(((counts - expected) ** 2 / expected).sum()) < 22.0  # 5 degrees of freedom: p about 5e-4


def test_broken_rows_are_told_and_harm_no_other() -> None:
    vocab = 40
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(5, vocab)).astype(np.float32)
    requests = [request(i, temperature=float(i % 2), top_p=0.9, logprobs=2) for i in range(5)]
    requests[4] = request(4, allowed_token_ids=[3], bad_word_ids=[[3]])
    good = Bench(requests, vocab).sample(logits.copy(), [0, 1, 2, 3, 4]).token_ids.tolist()
    logits[1, 7], logits[2, 0] = np.nan, np.inf
    output = Bench(requests, vocab).sample(logits, [0, 1, 2, 3, 4])
    assert torch.isfinite(output.best_logits).tolist() == [True, False, False, True, False]
    tokens = output.token_ids.tolist()
    assert [tokens[0], tokens[3]] == [good[0], good[3]] and all(0 <= token < vocab for token in tokens)


def test_a_slot_forgets_its_last_request() -> None:
    states = SamplingStates(1, 20, CPU)
    table = torch.zeros((1, 8), dtype=torch.int32)
    states.add(0, request(0, top_k=1, logit_bias={3: 100.0}, logprobs=1, bad_word_ids=[[1, 2]], min_tokens=4))
    states.add(0, request(1, temperature=0.0))
    batch = states.make_batch(np.zeros(1, np.int64), np.full(1, 5), table)
    assert not batch.processors and batch.random is None and batch.logprob_rows is None


def test_greedy_batches_prepare_nothing() -> None:
    bench = Bench([request(i, temperature=0.0) for i in range(4)], 20)
    batch = bench.states.make_batch(bench.slots, np.full(4, 3), bench.table, None)
    assert not batch.processors and batch.random is None and batch.logprob_rows is None


def test_mask_narrower_than_the_logits_forbids_the_rest() -> None:
    logits = np.zeros((1, 100), np.float32)
    logits[0, 99] = 9.0
    logits[0, 5] = 1.0
    mask = np.full((1, 2), 0xFFFFFFFF, np.uint32)
    mask[0, 0] ^= np.uint32(1)
    assert Bench([request(temperature=0.0)], 100).sample(logits, [0], mask).token_ids.tolist() == [5]


def test_token_ids_outside_the_vocabulary_are_found() -> None:
    assert find_token_error(request(0, [1, 2]), 10) is None
    for bad in (
        request(0, [1, 10]),
        request(0, [-1]),
        request(0, logit_bias={10: 1.0}),
        request(0, allowed_token_ids=[11]),
    ):
        assert "outside the vocabulary of 10" in (find_token_error(bad, 10) or "")


def test_packed_tokens_are_what_they_were() -> None:
    tokens = torch.tensor([7, 0, 123_456], dtype=torch.int32)
    best = torch.tensor([1.5, -torch.inf, torch.nan])
    for count in (3, 2):
        found = PackedTokens.pack(tokens, best).first(count).start_download()
        assert found.token_ids.tolist() == tokens[:count].tolist() and found.logprobs is None
        assert torch.equal(found.best_logits.isnan(), best[:count].isnan())
        assert found.best_logits[:2].tolist() == [1.5, -torch.inf]
