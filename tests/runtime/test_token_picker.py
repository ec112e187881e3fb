"""Tokens picked over ranks, which are threads here: those of one rank, alike everywhere, and few bytes exchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.token_mask import TokenMask
from headrace.kernels.native.library import NativeLibrary, load_library
from headrace.kernels.registry import load_kernels
from headrace.layers.embedding import share_vocabulary
from headrace.layers.sliced_logits import SlicedLogits, VocabularySlices
from headrace.parallel.state import ParallelState
from headrace.runtime.sampler import Sampler, SamplerOutput
from headrace.runtime.token_picker import TokenPicker
from tests.parallel.thread_group import ThreadCommunicator, run_ranks
from tests.runtime.test_sampler import Bench, request

CPU = torch.device("cpu")
ROWS = 9
KINDS = ["reference", "native"] if isinstance(load_library(), NativeLibrary) else ["reference"]
PLAIN = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, {"temperature": 2.5, "seed": 4}]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_k": 3, "seed": 5},
    {"temperature": 0.9, "top_p": 0.5, "seed": 6},
    {"temperature": 0.9, "min_p": 0.1, "seed": 7},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {"temperature": 0.0, "logit_bias": {1: 50.0}},
    {"temperature": 0.0, "allowed_token_ids": [10]},
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def some_logits(vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(ROWS, vocab, generator=generator)
    logits[4:6] = torch.randint(0, 2, (2, vocab), generator=generator).float()
    logits[6] = -1.0
    logits[7] = -torch.inf
    logits[7, -1] = -30.0
    return logits


def sliced(logits: torch.Tensor, parallel: ParallelState) -> SlicedLogits:
    """What a rank's head leaves; past the end of its slice lies what must not win."""
    if parallel.size == 1:
        return SlicedLogits(logits.clone())
    own, vocab = share_vocabulary(parallel, logits.shape[1]), logits.shape[1]
    slices = VocabularySlices(parallel.size, own, vocab, parallel.communicator.all_gather, CPU)
    padded = torch.full((len(logits), slices.width), torch.nan)
    padded[:, : slices.num_tokens] = logits[:, own]
    return SlicedLogits(padded, slices)


@pytest.mark.parametrize("kernels", KINDS)
@pytest.mark.parametrize("vocab", [11, 300])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_winners_are_those_of_one_rank(size: int, vocab: int, kernels: str) -> None:
    """Also where the vocabulary does not divide, and where a rank has none of it."""
    logits, sampling = some_logits(vocab), load_kernels("sampling", "cpu", kernels)
    key = torch.arange(ROWS) * 0x123456789ABCDEF
    temperature = torch.linspace(0.2, 3, ROWS)
    best, tokens = sampling.row_argmax(logits)
    drawn = sampling.sample_rows(logits, best, temperature, key)

    def work(parallel: ParallelState) -> list[torch.Tensor]:
        picker, mine = TokenPicker(sampling), sliced(logits, parallel)
        values, found = picker.best(mine)
        results = [values, found, picker.draw(mine, values, temperature, key)]
        some = torch.tensor([5, 2])
        results.append(picker.draw(mine.select(some), values[some], temperature[some], key[some]))
        results.append(mine.whole())
        return results

    for results in run_ranks(size, work):
        for found, expected in zip(results, [best, tokens, drawn, drawn[[5, 2]], logits], strict=True):
            assert torch.equal(found, expected)


def test_a_row_in_parts_is_exchanged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose slices are of several widths cut their rows into other parts: each must still call alike."""
    monkeypatch.setattr(
        "headrace.runtime.token_picker.row_parts",
        lambda rows, numbers, device: (
            slice(row, row + 1 + numbers % 2) for row in range(0, rows, 1 + numbers % 2)
        ),
    )
    test_winners_are_those_of_one_rank(3, 11, "reference")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("extra", [None, *WISHES], ids=str)
def test_steps_with_any_wishes(size: int, extra: dict[str, Any] | None) -> None:
    """Whole rows are gathered if and only if a request of the step reads them; tokens are those of one rank."""
    vocab = 50
    logits = some_logits(vocab).numpy()
    wishes = [PLAIN[row % len(PLAIN)] for row in range(ROWS)]
    if extra is not None:
        wishes[2] = extra
    bench = Bench([request(row, **wish) for row, wish in enumerate(wishes)], vocab)
    expected = bench.sample(logits, list(range(ROWS)))

    def work(parallel: ParallelState) -> tuple[SamplerOutput, list[int]]:
        positions = np.array([len(each.token_ids) for each in bench.requests], np.int64)
        batch = bench.states.make_batch(bench.slots, positions, bench.table)
        found = Sampler().sample(sliced(torch.from_numpy(logits), parallel), batch)
        sent = parallel.communicator.gathered if isinstance(parallel.communicator, ThreadCommunicator) else []
        return found, sent

    for found, sent in run_ranks(size, work):
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.best_logits, expected.best_logits)
        if expected.logprobs is not None:
            assert found.logprobs is not None
            assert found.logprobs.to_host() == expected.logprobs.to_host()
        if size > 1:
            num_random = sum(wish["temperature"] > 0 for wish in wishes)
            whole = [4 * ROWS * -(-vocab // size)]
            assert sent == (whole if extra is not None else [8 * ROWS, 8 * num_random])


def test_greedy_steps_exchange_once() -> None:
    def work(parallel: ParallelState) -> list[int]:
        bench = Bench([request(row, temperature=0.0) for row in range(ROWS)], 50)
        batch = bench.states.make_batch(bench.slots, np.full(ROWS, 3), bench.table)
        Sampler().sample(sliced(some_logits(50), parallel), batch)
        assert isinstance(parallel.communicator, ThreadCommunicator)
        return parallel.communicator.gathered

    assert run_ranks(2, work) == [[8 * ROWS]] * 2


def test_a_mask_reads_whole_rows() -> None:
    """Of requests that are plain but for their grammar."""
    bench = Bench([request(0, temperature=0.0)], 50)
    mask = np.full((1, 2), 0xFFFFFFFF, np.uint32)
    mask[0, 0] = 1 << 7
    logits = some_logits(50)[:1]
    expected = bench.sample(logits.numpy(), [0], mask)

    def work(parallel: ParallelState) -> torch.Tensor:
        batch = bench.states.make_batch(
            bench.slots, np.array([3]), bench.table, TokenMask(np.array([0]), mask)
        )
        return Sampler().sample(sliced(logits, parallel), batch).token_ids

    assert [each.tolist() for each in run_ranks(2, work)] == [expected.token_ids.tolist()] * 2
