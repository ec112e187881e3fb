"""Beam search gives what transformers' gives: tokens and scores, on tiny random models and the packaged one."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from tests.e2e.packaged_oracles import smollm2
from tests.e2e.tiny_models import VOCAB, make_model

PROMPT_LENGTHS = (1, 16, 40)
NUM_TOKENS = 12
NEAR_TIE = 1e-4


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]


@cache
def prepared(name: str, folder: Path) -> Any:
    return make_model(name, folder, seed=1)


REFERENCES: dict[str, list[tuple[list[int], float]]] = {}


def reference(model: Any, prompt: list[int], eos: list[int], **options: Any) -> list[tuple[list[int], float]]:
    """(tokens of the answer, score) of transformers' beams, best first. Computed once a setting."""
    key = f"{model.config.model_type} {prompt} {eos} {options}"
    if key not in REFERENCES:
        REFERENCES[key] = compute_reference(model, prompt, eos, **options)
    return REFERENCES[key]


def compute_reference(
    model: Any, prompt: list[int], eos: list[int], **options: Any
) -> list[tuple[list[int], float]]:
    outputs = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_return_sequences=options["num_beams"],
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    answers = []
    for row, score in zip(outputs.sequences.tolist(), outputs.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        ends = [index for index, token in enumerate(tokens) if token in eos]
        answers.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return answers


def score_of(answer: Any, length_penalty: float) -> float:
    return answer.cumulative_logprob / len(answer.token_ids) ** length_penalty


def compare(
    expected: list[tuple[list[int], float]],
    answers: list[Any],
    length_penalty: float,
    tolerance: float = 1e-4,
) -> None:
    """Same answers in the same order; two whose scores are a near tie may change places."""
    for (_, score), answer in zip(expected, answers, strict=True):
        assert score_of(answer, length_penalty) == pytest.approx(score, rel=tolerance, abs=tolerance)
    for index, (answer, (tokens, score)) in enumerate(zip(answers, expected, strict=True)):
        if answer.token_ids != tokens:
            near = [other for place, (_, other) in enumerate(expected) if place != index]
            assert any(abs(other - score) <= NEAR_TIE * max(abs(score), 1) for other in near), (
                f"answer {index} is {answer.token_ids}, transformers says {tokens}"
            )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("cascade", ["auto", "on"])
def test_tiny_models(tmp_path_factory: pytest.TempPathFactory, name: str, cascade: str) -> None:
    folder = tmp_path_factory.getbasetemp() / f"beams-{name}"
    folder.mkdir(exist_ok=True)
    model = prepared(name, folder)
    llm = LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        num_kv_blocks=600,
        cascade=cascade,
    )
    settings = list(
        itertools.product(
            [2, 4], [1.0, 0.0, 2.0], [True, False, "never"], [[], [7, 20, 33, 41, 60, 77, 90, 120]]
        )
    )
    rng = random.Random(0)
    for width, length_penalty, early_stopping, eos in rng.sample(settings, 4):
        params = SamplingParams(
            use_beam_search=True, n=width, temperature=0, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True,
            length_penalty=length_penalty, early_stopping=early_stopping, stop_token_ids=eos,
        )  # fmt: skip
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        llm._core.scheduler.check_integrity()  # type: ignore[union-attr]
        for prompt, output in zip(prompts(), outputs, strict=True):
            expected = reference(
                model, prompt, eos, num_beams=width, max_new_tokens=NUM_TOKENS, length_penalty=length_penalty,
                early_stopping=early_stopping,
            )  # fmt: skip
            compare(expected, output.outputs, length_penalty)
    llm.shutdown()


def test_wide_beams_and_a_narrow_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "beams-llama"
    folder.mkdir(exist_ok=True)
    model = prepared("llama", folder)
    llm = LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        num_kv_blocks=64,
        block_size=4,
    )
    params = SamplingParams(
        use_beam_search=True, n=1, best_of=12, temperature=0, max_tokens=NUM_TOKENS, logprobs=0
    )
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        expected = reference(model, prompt, [2], num_beams=12, max_new_tokens=NUM_TOKENS)
        compare(expected[:1], output.outputs, 1.0)
    assert llm._core.stats().num_preemptions > 0  # type: ignore[union-attr]
    llm.shutdown()


def test_best_of_gives_the_likeliest_samples(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "beams-llama"
    folder.mkdir(exist_ok=True)
    prepared("llama", folder)
    llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=128, num_kv_blocks=200)
    both = []
    for n in (2, 6):
        params = SamplingParams(n=n, best_of=6, seed=5, max_tokens=10, ignore_eos=True, logprobs=0)
        (output,) = llm.generate(prompts()[2], params, use_tqdm=False)
        both.append(output.outputs)
    few, whole = both
    ranked = sorted(whole, key=lambda answer: -score_of(answer, 1.0))
    assert [answer.token_ids for answer in few] == [answer.token_ids for answer in ranked[:2]]
    assert [answer.index for answer in few] == [0, 1]
    llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("linear_inputs", "tolerance"), [("float", 1e-4), ("auto", 1e-3)])
def test_the_packaged_model(linear_inputs: str, tolerance: float) -> None:
    """Inputs that are rounded before packed weights move scores a little, and the answers not at all."""
    model = smollm2()
    text = ["The miller's daughter", "def fib(n):", "Three colours of the sea are"]
    llm = LLM("smollm2", dtype="float32", num_kv_blocks=400, linear_inputs=linear_inputs)
    params = SamplingParams(use_beam_search=True, n=4, temperature=0, max_tokens=24, logprobs=0)
    outputs = llm.generate(text, params, use_tqdm=False)
    for output in outputs:
        expected = reference(model, output.prompt_token_ids, [2], num_beams=4, max_new_tokens=24)
        compare(expected, output.outputs, 1.0, tolerance)
    llm.shutdown()
