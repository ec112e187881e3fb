"""Native sampling functions against the reference's."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.native import sampling, token_mask
from headrace.kernels.reference import sampling as reference
from headrace.kernels.reference import token_mask as reference_mask
from headrace.kernels.reference.noise import exponentials
from tests.kernels.sliced_cases import CUTS, check_slices

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 7, 100, 4096, 4097, 49152])
def test_row_argmax(rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    for wanted in range(4):
        x = torch.randint(-9, 9, (rows, width + 3), generator=generator).float()[:, 1 : width + 1]
        if wanted == 1:
            x = torch.randn(rows, width, generator=generator)
        if wanted == 2:
            x[:, width // 2 :] = torch.nan
        if wanted == 3:
            x.fill_(-torch.inf)
        values, ids = sampling.row_argmax(x)
        plain_values, plain_ids = reference.row_argmax(x.contiguous()) if rows else (x[:, 0], x[:, 0].long())
        torch.testing.assert_close(values, plain_values, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ids, plain_ids)


@pytest.mark.parametrize("width", [1, 15, 5000, 49155])
@pytest.mark.parametrize("filters", ["none", "top_k", "all"])
def test_sample_rows(width: int, filters: str) -> None:
    """The reference's tokens, but for those whose scores are equal to the last bits."""
    generator = torch.Generator().manual_seed(width)
    logits = 4 * torch.randn(40, width + 2, generator=generator)[:, 1 : width + 1]
    logits[3, width // 2 :] = -torch.inf
    logits[3, 0] = 0.0
    row_max, temperature = logits.amax(-1), torch.rand(40, generator=generator) + 0.3
    key = torch.randint(-(1 << 63), (1 << 63) - 1, (40,), generator=generator)
    options: dict[str, torch.Tensor | int] = {}
    if filters != "none":
        options = {"top_k": torch.randint(0, min(9, width), (40,), generator=generator), "max_top_k": 9}
    if filters == "all":
        options |= {"top_p": torch.rand(40, generator=generator) + 0.01, "min_p": torch.full((40,), 0.01)}
    found = sampling.sample_rows(logits, row_max, temperature, key, **options)  # type: ignore[arg-type]
    expected = reference.sample_rows(logits, row_max, temperature, key, **options)  # type: ignore[arg-type]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_noise(seed: int) -> None:
    """Each token alone: with two tokens the one whose weight is above its noise's share of the other wins."""
    key = torch.tensor([seed * 0x123456789ABCDEF - 5])
    noise = exponentials(key, 300_000)[0]
    for token in [*range(40), int(noise.argmin()), int(noise.argmax())]:
        for factor, wins in ((1.00001, True), (0.99999, False)):
            weights = torch.zeros(1, 300_000)
            weights[0, token] = noise[token] * factor
            other = 123_456
            weights[0, other] = noise[other]
            drawn = sampling._draw(weights, None, None, key)
            assert int(drawn) == (token if wins else other)


def test_nan_is_drawn_first() -> None:
    logits = torch.zeros(2, 100)
    logits[1, 7:9] = torch.nan
    ones, keys = torch.ones(2), torch.tensor([1, 2])
    assert (
        int(sampling.sample_rows(logits, logits.amax(-1), ones, keys)[1]) == 0
    )  # all of the row's weights are NaN


@pytest.mark.parametrize(
    "shape", [(3, 64, 2, 3), (4, 100, 4, 2), (5, 70, 2, 4), (2, 33, 2, 1), (3, 40, 5, 0), (6, 5000, 157, 5)]
)
def test_token_mask(shape: tuple[int, int, int, int]) -> None:
    num_rows, vocab_size, num_words, num_masked = shape
    generator = torch.Generator().manual_seed(vocab_size)
    buffer = torch.randn(num_rows, vocab_size + 3, generator=generator)
    rows = torch.randperm(num_rows, generator=generator)[:num_masked]
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (num_masked, num_words), generator=generator).int()
    words[:, ::2] = torch.randint(-1, 1, words[:, ::2].shape, generator=generator).int()
    expected = buffer.clone()
    reference_mask.apply_token_mask(expected[:, :vocab_size], rows, words)
    token_mask.apply_token_mask(buffer[:, :vocab_size], rows, words)
    assert torch.equal(buffer, expected)


def test_all_that_samplers_use_is_there() -> None:
    own = {
        name
        for name, value in vars(reference).items()
        if getattr(value, "__module__", "") == reference.__name__
    }
    assert {name for name in own if not name.startswith("_")} == set(sampling.__all__)


@pytest.mark.parametrize(("vocab", "count"), CUTS)
def test_slices_give_the_picks_of_whole_rows(vocab: int, count: int) -> None:
    check_slices(sampling, vocab, count)
