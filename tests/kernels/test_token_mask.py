"""Token masks, the reference against single bits and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference.token_mask import apply_token_mask


def case(
    num_rows: int, vocab_size: int, num_words: int, num_masked: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    rows = torch.randperm(num_rows, generator=generator)[:num_masked]
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (num_masked, num_words), generator=generator).int()
    return logits, rows, words


SHAPES = [(3, 64, 2, 3), (4, 100, 4, 2), (5, 70, 2, 4), (2, 33, 2, 1), (3, 40, 5, 0)]


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_decide(shape: tuple[int, int, int, int]) -> None:
    logits, rows, words = case(*shape)
    found = logits.clone()
    apply_token_mask(found, rows, words)
    for row in range(shape[0]):
        masks = words[(rows == row).nonzero().flatten()]
        for token in range(shape[1]):
            is_known = token < 32 * shape[2]
            is_allowed = not len(masks) or (is_known and int(masks[0, token // 32]) >> (token % 32) & 1)
            assert found[row, token] == (logits[row, token] if is_allowed else -torch.inf)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_equals_the_reference(shape: tuple[int, int, int, int]) -> None:
    pytest.importorskip("triton")
    from headrace.kernels.triton import token_mask
    from tests.kernels.triton_setup import DEVICE

    logits, rows, words = case(*shape)
    expected, found = logits.clone(), logits.to(DEVICE)
    apply_token_mask(expected, rows, words)
    token_mask.apply_token_mask(found, rows.to(DEVICE), words.to(DEVICE))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.gpu
def test_large_vocabularies() -> None:
    from headrace.kernels.triton import token_mask

    logits, rows, words = case(256, 262144, 8192, 200)
    expected, found = logits.cuda(), logits.cuda()
    apply_token_mask(expected, rows.cuda(), words.cuda())
    token_mask.apply_token_mask(found, rows.cuda(), words.cuda())
    assert torch.equal(found, expected)
