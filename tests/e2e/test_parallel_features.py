"""What requests can ask for, over several ranks: the answers of one rank, log-probabilities and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.outputs import RequestOutput
from tests.e2e.tiny_models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 9},
    {"temperature": 0.0, "n": 3, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 2},
    {"temperature": 1.0, "top_k": 7, "min_p": 0.02, "seed": 6, "logprobs": 2},
    {
        "temperature": 0.7,
        "seed": 7,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
    },
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.9, "seed": 8, "logit_bias": {9: 4.0}, "allowed_token_ids": [7, 8, 9, 10, 11]},
    {"temperature": 0.0, "use_beam_search": True, "n": 2, "best_of": 4},
    {"temperature": 0.0, "stop_token_ids": [5, 6, 7, 8, 9, 10, 11, 12], "min_tokens": 4},
]


def answers(folder: Path, **options: Any) -> list[RequestOutput]:
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "num_kv_blocks": 120,
    }
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **wish) for wish in WISHES]
    prompts = [{"prompt_token_ids": [5, 6, 7, 8 + number] * (1 + number)} for number in range(len(params))]
    with LLM(str(folder), **{**settings, **options}) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def spread(entries: Any) -> list[tuple[int, float]]:
    """Log-probabilities in order."""
    return [
        (token, value.logprob)
        for entry in entries or []
        for token, value in sorted((entry or {}).items(), key=lambda item: item[0])
    ]


@pytest.mark.parametrize("pick_in_parts", [False, True])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_every_wish_is_granted_alike(tmp_path: Path, tensor: int, pipeline: int, pick_in_parts: bool) -> None:
    make_model("llama", tmp_path)
    expected = answers(tmp_path)
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    found = answers(tmp_path, pick_in_parts=pick_in_parts, **sizes)
    for wish, one, other in zip(WISHES, expected, found, strict=True):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids, wish
            assert mine.finish_reason == theirs.finish_reason
            pairs = zip(spread(mine.logprobs), spread(theirs.logprobs), strict=True)
            assert all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-3 for a, b in pairs), wish
        pairs = zip(spread(one.prompt_logprobs), spread(other.prompt_logprobs), strict=True)
        assert all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-3 for a, b in pairs), wish
