"""The vocabulary at both ends: cut over ranks, tied, stored narrowly."""

from __future__ import annotations

import pytest
import torch

from headrace.layers.embedding import ParallelLMHead, VocabParallelEmbedding, share_vocabulary
from headrace.parallel.state import ParallelState
from tests.layers.dict_weights import DictWeights, context, random_tensors
from tests.parallel.thread_group import run_ranks

VOCAB, WIDTH = 11, 6
TENSORS = random_tensors({"embed.weight": (VOCAB, WIDTH), "head.weight": (VOCAB, WIDTH)})
IDS = torch.tensor([10, 0, 3, 5, 5])
HIDDEN = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5))
ROWS = torch.tensor([3, 1, 3])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_rank_gets_whole_embeddings_and_whole_logits(size: int) -> None:
    """Also when the vocabulary does not divide, and when a rank has nothing of it."""

    def work(parallel: ParallelState) -> tuple[torch.Tensor, torch.Tensor, int]:
        weights = DictWeights(TENSORS)
        ctx = context(weights, parallel)
        embedding = VocabParallelEmbedding(ctx, "embed", VOCAB, WIDTH, 2.0)
        head = ParallelLMHead(ctx, "head", VOCAB, WIDTH)
        out = torch.full((len(IDS), WIDTH), torch.nan)
        embedding(IDS, out)
        return out, head(HIDDEN, ROWS).whole().clone(), sum(shape[0] for _, shape in weights.read)

    results = run_ranks(size, work)
    for embedded, logits, _ in results:
        assert torch.equal(embedded, TENSORS["embed.weight"][IDS] * 2.0)
        torch.testing.assert_close(logits, HIDDEN[ROWS] @ TENSORS["head.weight"].T, rtol=1e-5, atol=1e-5)
    assert sum(rows for _, _, rows in results) == 2 * VOCAB


def test_shares_of_a_vocabulary() -> None:
    shares = [share_vocabulary(ParallelState(rank, 8), VOCAB) for rank in range(8)]
    assert [row for share in shares for row in range(VOCAB)[share]] == list(range(VOCAB))
    assert all(share.stop - share.start <= 2 for share in shares)


def test_a_tied_head_shares_the_table() -> None:
    ctx = context(DictWeights(TENSORS))
    embedding = VocabParallelEmbedding(ctx, "embed", VOCAB, WIDTH, 1.0)
    head = ParallelLMHead(ctx, "head", VOCAB, WIDTH, embedding)
    torch.testing.assert_close(head(HIDDEN, ROWS).whole(), HIDDEN[ROWS] @ TENSORS["embed.weight"].T)
    assert head._matrix.weight.data_ptr() == embedding.weight.data_ptr()
    out = torch.empty(len(IDS), WIDTH)
    embedding(IDS, out)
    assert torch.equal(out, TENSORS["embed.weight"][IDS])


def test_a_tied_vocabulary_that_is_packed_in_blocks() -> None:
    table = torch.randn(13_000, 4, generator=torch.Generator().manual_seed(1))
    ctx = context(DictWeights({"embed.weight": table}))
    embedding = VocabParallelEmbedding(ctx, "embed", 13_000, 4, 1.0)
    logits = ParallelLMHead(ctx, "head", 13_000, 4, embedding)(HIDDEN[:, :4].contiguous(), ROWS).whole()
    torch.testing.assert_close(logits, HIDDEN[ROWS, :4] @ table.T)
    ids, out = torch.tensor([12_999, 0, 4095, 4096]), torch.empty(4, 4)
    embedding(ids, out)
    assert embedding.weight.dim() == 3 and torch.equal(out, table[ids])


def test_soft_cap_bounds_the_logits() -> None:
    ctx = context(DictWeights({name: tensor * 10 for name, tensor in TENSORS.items()}))
    plain = ParallelLMHead(ctx, "head", VOCAB, WIDTH)(HIDDEN, ROWS).whole().clone()
    capped = ParallelLMHead(ctx, "head", VOCAB, WIDTH, soft_cap=3.0)(HIDDEN, ROWS).whole()
    assert plain.abs().max() > 10
    torch.testing.assert_close(capped, 3.0 * torch.tanh(plain / 3.0))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_a_narrow_table_stays_narrow_without_changing_results(stored: torch.dtype) -> None:
    table = TENSORS["embed.weight"].to(stored)
    ctx = context(DictWeights({"embed.weight": table}))
    embedding = VocabParallelEmbedding(ctx, "embed", VOCAB, WIDTH, 3.0)
    assert embedding.weight.dtype == (torch.float32 if stored == torch.float64 else stored)
    out = torch.empty(len(IDS), WIDTH)
    embedding(IDS, out)
    assert torch.equal(out, table.float()[IDS] * 3.0)
    logits = ParallelLMHead(ctx, "head", VOCAB, WIDTH, embedding)(HIDDEN, ROWS).whole()
    torch.testing.assert_close(logits, HIDDEN[ROWS] @ table.float().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_fp32(dtype: torch.dtype) -> None:
    ctx = context(DictWeights(TENSORS), dtype=dtype)
    logits = ParallelLMHead(ctx, "head", VOCAB, WIDTH)(HIDDEN.to(dtype), ROWS).whole()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, HIDDEN[ROWS] @ TENSORS["head.weight"].T, rtol=0.05, atol=0.05)
