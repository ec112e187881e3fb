"""How much of a prompt joins a step."""

from __future__ import annotations

import math

import pytest

from headrace.core.batching import ContinuousBatching
from headrace.core.cost_model import CostModel, StepFeatures

WANTED = 8192


def features(num_decodes: int) -> StepFeatures:
    made = StepFeatures()
    for _ in range(num_decodes):
        made.add(100, 1, samples=True)
    return made


@pytest.mark.parametrize("is_fitted", [False, True])
@pytest.mark.parametrize("num_decodes", [0, 4])
def test_without_a_longest_stall_nothing_is_cut(is_fitted: bool, num_decodes: int) -> None:
    model = CostModel()
    for _ in range(9 if is_fitted else 0):  # steps so slow that any limit would cut the prompt
        model.observe(features(4), 1e5)
    assert model.is_fitted == is_fitted
    wanted = (num_decodes, features(num_decodes), 0, WANTED, True)
    assert ContinuousBatching(model, math.inf).chunk_tokens(*wanted) == WANTED
    assert ContinuousBatching(model, 250.0).chunk_tokens(*wanted) < WANTED


def shared_chunks(model: CostModel, num_decodes: int) -> int:
    """Prompt tokens of a step that prompts of 100 tokens join until there is no room."""
    batching, step = ContinuousBatching(model, 250.0), features(num_decodes)
    for _ in range(100):
        chunk = batching.chunk_tokens(num_decodes, step, 0, 100, False)
        if not chunk:
            break
        step.add(0, chunk, samples=True)
    return step.num_tokens - num_decodes


@pytest.mark.parametrize("num_decodes", [0, 4])
def test_the_prompts_of_a_step_share_what_is_allowed_before_anything_is_known(num_decodes: int) -> None:
    assert shared_chunks(CostModel(), num_decodes) + num_decodes == 256 * (1 if num_decodes else 4)


@pytest.mark.parametrize(("step_ms", "num_tokens"), [(512.0, 500), (128.0, 2000)])
def test_one_step_with_prompts_tells_how_many_tokens_the_next_may_have(
    step_ms: float, num_tokens: int
) -> None:
    model = CostModel()
    model.observe(StepFeatures(1024, 10, 10, 1024, 512.0), step_ms)
    assert shared_chunks(model, 4) + 4 == num_tokens
    assert shared_chunks(model, 0) == 4 * num_tokens
