from __future__ import annotations

import time
from typing import Any

import pytest

from headrace.engine.input_processor import InputProcessor
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams

VOCAB = 300
BOS = 256


class ByteTokenizer:
    """One token a byte, after a beginning-of-text token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())


@pytest.fixture
def processor() -> InputProcessor:
    return InputProcessor(
        vocab_size=VOCAB, max_model_len=20, eos_token_ids=[0, 257], tokenizer=ByteTokenizer()
    )


def refused(processor: InputProcessor, prompt: Any = "Hi", clamp: bool = True, **params: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        processor.process("r", prompt, SamplingParams(**params), clamp_max_tokens=clamp)
    return caught.value


def test_text_is_tokenized(processor: InputProcessor) -> None:
    before = time.monotonic()
    request, prompt = processor.process("r7", "Hi", SamplingParams(max_tokens=5, seed=3))
    assert prompt == "Hi"
    assert (request.request_id, request.prompt_token_ids, request.max_tokens) == ("r7", [BOS, 72, 105], 5)
    assert request.eos_token_ids == [0, 257] and request.sampling_params.seed == 3
    assert before <= request.arrival_time <= time.monotonic()


def test_token_ids_count_and_text_is_for_show(processor: InputProcessor) -> None:
    prompt = {"prompt": "shown", "prompt_token_ids": [4, 5], "cache_salt": "tenant"}
    request, shown = processor.process("r", prompt, SamplingParams(), priority=2, tenant="t")
    assert (request.prompt_token_ids, shown, request.namespace) == ([4, 5], "shown", "tenant")
    assert (request.priority, request.tenant) == (2, "t")


def test_the_users_parameters_are_copied(processor: InputProcessor) -> None:
    params = SamplingParams(bad_words=["x"])
    request, _ = processor.process("r", "Hi", params)
    assert params.bad_word_ids is None
    params.temperature = 0.5
    assert request.sampling_params.temperature == 1.0


def test_parameters_changed_after_they_were_made_are_checked_again(processor: InputProcessor) -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(RequestError, match="temperature"):
        processor.process("r", "Hi", params)


@pytest.mark.parametrize(("num_tokens", "room"), [(1, 19), (19, 1)])
def test_the_rest_of_the_context(processor: InputProcessor, num_tokens: int, room: int) -> None:
    prompt = list(range(num_tokens))
    for wanted in (None, room, room + 1, 10**6):
        request, _ = processor.process("r", prompt, SamplingParams(max_tokens=wanted))
        assert request.max_tokens == room
    request, _ = processor.process("r", prompt, SamplingParams(max_tokens=1), clamp_max_tokens=False)
    assert request.max_tokens == 1


def test_max_tokens_beyond_the_context_is_refused_when_not_clamped(processor: InputProcessor) -> None:
    request, _ = processor.process("r", [1] * 15, SamplingParams(max_tokens=5), clamp_max_tokens=False)
    assert request.max_tokens == 5
    request, _ = processor.process("r", [1] * 15, SamplingParams(max_tokens=None), clamp_max_tokens=False)
    assert request.max_tokens == 5
    error = refused(processor, [1] * 15, clamp=False, max_tokens=6)
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    assert "max_tokens is 6" in error.message and "at most 5" in error.message


@pytest.mark.parametrize("num_tokens", [20, 21, 5000])
def test_too_long_prompts_are_refused(processor: InputProcessor, num_tokens: int) -> None:
    error = refused(processor, [1] * num_tokens, max_tokens=1)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert f"{num_tokens} tokens" in error.message and "19 or fewer" in error.message


def test_too_long_text_is_refused(processor: InputProcessor) -> None:
    assert refused(processor, "x" * 19).code == "context_length_exceeded"


def test_empty_prompts_are_refused(processor: InputProcessor) -> None:
    assert "empty" in refused(processor, []).message
    assert "empty" in refused(processor, {"prompt_token_ids": []}).message
    request, _ = processor.process("r", "", SamplingParams())  # beginning-of-text alone is a prompt
    assert request.prompt_token_ids == [BOS]


@pytest.mark.parametrize("wrong", [-1, VOCAB, 10**9])
def test_ids_outside_the_vocabulary(processor: InputProcessor, wrong: int) -> None:
    error = refused(processor, [1, wrong, 2])
    assert error.param == "prompt" and str(wrong) in error.message and "[0, 299]" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [1, VOCAB]),
        ("allowed_token_ids", [VOCAB]),
        ("logit_bias", {1: 1.0, VOCAB: 2.0}),
        ("bad_word_ids", [[1], [2, VOCAB]]),
    ],
)
def test_parameter_ids_outside_the_vocabulary(processor: InputProcessor, name: str, value: Any) -> None:
    error = refused(processor, **{name: value})
    assert error.param == name and "300" in error.message


def test_bad_words_are_spelled_with_and_without_a_space(processor: InputProcessor) -> None:
    request, _ = processor.process("r", "Hi", SamplingParams(bad_words=["ab", " ab"], bad_word_ids=[[9]]))
    assert request.sampling_params.bad_word_ids == [[9], [97, 98], [32, 97, 98]]


def test_empty_bad_word_ids_are_refused(processor: InputProcessor) -> None:
    assert refused(processor, bad_word_ids=[[1], []]).param == "bad_word_ids"


def test_logprobs_from_beyond_the_prompt(processor: InputProcessor) -> None:
    assert refused(processor, [1, 2], prompt_logprobs=0, logprobs_from=2).param == "logprobs_from"
    processor.process("r", [1, 2], SamplingParams(prompt_logprobs=0, logprobs_from=1))


def test_without_a_tokenizer() -> None:
    processor = InputProcessor(vocab_size=VOCAB, max_model_len=20)
    request, prompt = processor.process("r", [1, 2], SamplingParams())
    assert (request.prompt_token_ids, prompt) == ([1, 2], None)
    assert "token ids" in refused(processor, "Hi").message
    assert "stop_token_ids" in refused(processor, [1], stop=["x"]).message
    assert "bad_word_ids" in refused(processor, [1], bad_words=["x"]).message
