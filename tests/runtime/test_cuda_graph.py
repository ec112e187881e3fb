"""Choosing between fixed and exact plans; the graphs themselves need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import CapacityError
from headrace.runtime.cuda_graph import LimitedBackend


class Planner:
    """Says its name, or that it has no room."""

    def __init__(self, name: str, is_full: bool = False) -> None:
        self.name, self.is_full = name, is_full

    def plan(self, metadata: Any) -> Any:
        if self.is_full:
            raise CapacityError("full")
        return self.name


@pytest.mark.parametrize(
    "num_tokens, is_full, expected", [(8, False, "fixed"), (9, False, "exact"), (8, True, "exact")]
)
def test_small_steps_are_planned_into_fixed_buffers(num_tokens: int, is_full: bool, expected: str) -> None:
    backend = LimitedBackend(Planner("fixed", is_full), Planner("exact"), 8)  # type: ignore[arg-type]
    metadata = SimpleNamespace(query_starts=np.array([0, num_tokens]))
    assert backend.plan(metadata) == expected  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.gpu
def test_graphs_give_the_eager_tokens(tmp_path: Any) -> None:
    from headrace import LLM, SamplingParams
    from tests.e2e.tiny_models import make_model

    make_model("llama", tmp_path)
    prompts = [{"prompt_token_ids": [5 + i, 6, 7][: 1 + i % 3]} for i in range(9)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    answers = []
    for max_graph_tokens in (0, 64):
        with LLM(
            str(tmp_path),
            dtype="float32",
            skip_tokenizer_init=True,
            max_graph_tokens=max_graph_tokens,
            max_model_len=256,
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert torch.cuda.is_available() and answers[0] == answers[1]
