"""Every architecture gives the logits that transformers gives, on tiny random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tests.models.paged_model import PagedModel
from tests.models.tiny_models import ARCHITECTURES, TINY_MODELS, VOCAB_SIZE, save

TOLERANCE = 1e-4
Case = tuple[str, transformers.PreTrainedModel, Path]


@pytest.fixture(scope="module", params=TINY_MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = TINY_MODELS[request.param].make()
    return request.param, model, save(model, tmp_path_factory.mktemp("model"))


def prompts(name: str, count: int, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    longest = TINY_MODELS[name].num_tokens
    return [torch.randint(VOCAB_SIZE, (longest - 7 * n,), generator=generator) for n in range(count)]


def expected_logits(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens[None], use_cache=False).logits[0].float()
    return logits


def test_one_shot_prefill(case: Case) -> None:
    name, reference, folder = case
    paged = PagedModel(folder)
    [tokens] = prompts(name, 1)
    expected = expected_logits(reference, tokens)
    logits = paged.step([(0, tokens)])
    assert logits.dtype == torch.float32
    assert expected.std() > 0.5, "logits so close together prove little"
    assert (logits - expected).abs().max() <= TOLERANCE


def cut(tokens: torch.Tensor, sizes: list[int]) -> Iterator[torch.Tensor]:
    """Chunks of the given sizes, then one token at a time."""
    start = 0
    for size in sizes:
        yield tokens[start : start + size]
        start += size
    yield from tokens[start:].split(1)


def test_chunks_and_decodes_of_several_requests_in_one_step(case: Case) -> None:
    """Three prompts, cut differently, run beside each other; requests join late and end early."""
    name, reference, folder = case
    texts = prompts(name, 3)
    paged = PagedModel(folder, num_requests=3)
    chunks = [cut(texts[0], [1, 17, 5]), cut(texts[1], [len(texts[1]) - 9]), cut(texts[2], [3, 3, 2, 9])]
    got: list[list[torch.Tensor]] = [[], [], []]
    running, step = {0, 2}, 0
    while running:
        work = []
        for request in sorted(running, key=lambda r: (r + step) % 3):
            chunk = next(chunks[request], None)
            if chunk is None:
                running.discard(request)
            else:
                work.append((request, chunk))
        if work:
            rows = paged.step(work).split([len(chunk) for _, chunk in work])
            for (request, _), logits in zip(work, rows, strict=True):
                got[request].append(logits)
        step += 1
        if step == 4:
            running.add(1)
    for tokens, logits in zip(texts, got, strict=True):
        assert (torch.cat(logits) - expected_logits(reference, tokens)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_half_precision_is_as_exact_as_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = TINY_MODELS[name].make()
    folder = save(reference, tmp_path)
    [tokens] = prompts(name, 1)
    exact = expected_logits(reference, tokens)
    theirs = (expected_logits(reference.to(dtype), tokens) - exact).square().mean().sqrt()
    paged = PagedModel(folder, dtype=dtype)
    ours = (paged.step([(0, tokens)]) - exact).square().mean().sqrt()
    assert 0 < ours <= 1.1 * theirs


def test_rows_are_gathered_before_the_head(case: Case) -> None:
    name, _, folder = case
    paged = PagedModel(folder)
    [tokens] = prompts(name, 1)
    hidden = paged.model.forward(paged.batch([(0, tokens)]))
    every = paged.model.compute_logits(hidden, torch.arange(len(tokens))).whole().clone()
    rows = torch.tensor([len(tokens) - 1, 0, 7])
    assert (paged.model.compute_logits(hidden, rows).whole() - every[rows]).abs().max() <= 1e-5
    assert paged.model.compute_logits(hidden, rows[:0]).whole().shape == (0, VOCAB_SIZE)
