"""A program that holds an engine may have set torch's default type or device; answers do not follow them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.kernels.native.library import NativeLibrary, load_library
from tests.e2e.tiny_models import VOCAB, make_model

HAS_NATIVE = isinstance(load_library(), NativeLibrary)
KERNELS = ["reference", *(["native"] if HAS_NATIVE else [])]
WISHES: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.8, "seed": 2},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.1},
    {"logit_bias": {5: 2.0}, "min_tokens": 3, "stop_token_ids": list(range(9, 60))},
    {"bad_word_ids": [[token, other] for token in range(3, VOCAB) for other in range(3, 8)]},
    {"allowed_token_ids": [7, 8, 9]},
    {"use_beam_search": True, "best_of": 3},
]


@pytest.fixture
def _default_type() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def answers(folder: Path, default: torch.dtype, **options: Any) -> list[Any]:
    """Tokens and log-probabilities of all wishes in one batch, then tokens of a batch that asks for nothing."""
    torch.set_default_dtype(default)
    params = [SamplingParams(max_tokens=8, **{"temperature": 0.0, **wish}) for wish in WISHES]
    prompts = [{"prompt_token_ids": list(range(3, 8 + 3 * number))} for number in range(len(WISHES))]
    with LLM(
        str(folder), skip_tokenizer_init=True, num_kv_blocks=80, max_model_len=128, device="cpu", threads=1,
        max_steps_outstanding=1, max_stall_ms=float("inf"), **options,
    ) as llm:  # fmt: skip
        mixed = llm.generate(prompts, params, use_tqdm=False)
        plain = llm.generate(prompts, params[0], use_tqdm=False)
    return [
        [(one.token_ids, one.logprobs, output.prompt_logprobs) for one in output.outputs]
        for output in (*mixed, *plain)
    ]


@pytest.mark.usefixtures("_default_type")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("options", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}], ids=str)
def test_answers_do_not_follow_it(tmp_path: Path, options: dict[str, Any], kernels: str) -> None:
    make_model("llama", tmp_path)
    settings = {"dtype": "bfloat16", "kernels": kernels, **options}
    expected = answers(tmp_path, torch.float32, **settings)
    for default in (torch.bfloat16, torch.float16, torch.float64):
        assert answers(tmp_path, default, **settings) == expected


@pytest.mark.usefixtures("_default_type")
def test_made_up_weights_do_not_follow_it(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    expected = answers(tmp_path, torch.float32, load_format="dummy")
    for default in (torch.bfloat16, torch.float64):
        assert answers(tmp_path, default, load_format="dummy") == expected


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("options", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}], ids=str)
def test_answers_do_not_follow_the_default_device(
    tmp_path: Path, options: dict[str, Any], kernels: str
) -> None:
    make_model("llama", tmp_path)
    settings = {"dtype": "bfloat16", "kernels": kernels, **options}
    expected = answers(tmp_path, torch.float32, **settings)
    with torch.device("meta"):  # where nothing can be computed
        assert answers(tmp_path, torch.float32, **settings) == expected
