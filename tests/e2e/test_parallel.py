"""Several ranks give the greedy tokens of transformers, whatever else is switched on. Ranks are processes over gloo.

An engine of several processes takes seconds to start, so that one case runs always and the rest is marked slow.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_equivalence import NUM_OUTPUT, compare, pairs, prompts, singles
from tests.e2e.tiny_models import MAKERS, MORE_MAKERS, Reference, greedy_reference, make_model

SIZES = [(2, 1), (4, 1), (1, 2), (2, 2)]
"""(tensor, pipeline)"""
NUM_SETTINGS = 2
"""Settings of the other factors that each model and size runs with, beside ``CROWDED``."""
CROWDED = {
    **singles()[0],
    "max_prefill_chunk": 7,
    "memory": "tight",
    "n": 3,
    "arrival": "staggered",
    "max_steps_outstanding": 3,
}
"""Chunks, hits of the prefix cache, preemptions, n > 1 and steps in flight, all at once."""


@cache
def prepared(name: str, root: Path) -> tuple[Path, list[Reference]]:
    folder = root / name
    model = make_model(name, folder, num_attention_heads=4)
    return folder, [greedy_reference(model, prompt, NUM_OUTPUT) for prompt in prompts()]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


def settings_of(index: int) -> list[dict[str, Any]]:
    """Some of the matrix's settings, others for each index, so that over all models and sizes most pairs run. Cache
    tiers need one device."""
    every = [setting for setting in (*pairs(), *singles()) if setting["tiers"] == "none"]
    return [every[(index * NUM_SETTINGS + number) % len(every)] for number in range(NUM_SETTINGS)]


@pytest.mark.parametrize("pick_in_parts", [False, True])
def test_two_tensor_ranks(root: Path, pick_in_parts: bool) -> None:
    folder, references = prepared("llama", root)
    setting = {**CROWDED, "tensor_parallel_size": 2, "threads": 1, "pick_in_parts": pick_in_parts}
    core = compare(folder, references, setting)
    assert core.stats().num_preemptions > 0 and core.stats().prefix_hit_tokens > 0


CASES = [(name, *size) for size in SIZES for name in MAKERS | MORE_MAKERS]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "tensor", "pipeline"), CASES)
def test_every_model_and_size_with_other_switches(root: Path, name: str, tensor: int, pipeline: int) -> None:
    folder, references = prepared(name, root)
    parallel = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "threads": 1}
    core = compare(folder, references, {**CROWDED, **parallel})
    assert core.stats().prefix_hit_tokens > 0
    assert core.stats().num_preemptions > 0 or name == "gemma3", "its sliding layers give blocks back"
    for setting in settings_of(CASES.index((name, tensor, pipeline))):
        compare(folder, references, {**setting, **parallel})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pipeline_as_it_is_by_default(root: Path) -> None:
    """Micro-batches take turns, with two steps a stage in flight."""
    folder, references = prepared("llama", root)
    for stages in (2, 3):
        setting = {
            **singles()[0],
            "max_steps_outstanding": None,
            "pipeline_parallel_size": stages,
            "threads": 1,
        }
        core = compare(folder, references, setting)
        assert core.scheduler.config.steps_outstanding == 2 * stages
        assert core.scheduler.micro_batches.count == stages
