from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.prompts import ParsedPrompt, parse_prompt, split_batch
from headrace.errors import RequestError


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("Hi", ["Hi"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", "b"], ["a", "b"]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([{"prompt": "a"}, "b", [1]], [{"prompt": "a"}, "b", [1]]),
        (("a", "b"), ["a", "b"]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_split_batch(prompts: Any, expected: list[Any]) -> None:
    assert split_batch(prompts) == expected


@pytest.mark.parametrize("wrong", [3, None, b"bytes", {1, 2}, 1.5])
def test_split_batch_names_the_forms(wrong: Any) -> None:
    with pytest.raises(RequestError, match="prompt_token_ids"):
        split_batch(wrong)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", ParsedPrompt("Hi", None)),
        ([1, 2], ParsedPrompt(None, [1, 2])),
        ((1, 2), ParsedPrompt(None, [1, 2])),
        ({"prompt": "Hi"}, ParsedPrompt("Hi", None)),
        ({"prompt_token_ids": [3]}, ParsedPrompt(None, [3])),
        ({"prompt": "x", "prompt_token_ids": [3]}, ParsedPrompt("x", [3])),
        ({"prompt": "x", "cache_salt": "t"}, ParsedPrompt("x", None, "t")),
        ({"prompt": "x", "multi_modal_data": None}, ParsedPrompt("x", None)),
    ],
)
def test_parse_prompt(prompt: Any, expected: ParsedPrompt) -> None:
    assert parse_prompt(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1, "a"], "'a' at position 1"),
        ([1, True], "True at position 1"),
        ([1.0], r"1\.0 at position 0"),
        ([[1]], r"\[1\] at position 0"),
        ({}, "neither"),
        ({"prompt": 3}, "must be a string"),
        ({"prompt_token_ids": "12"}, "list of integers"),
        ({"prompt": "x", "cache_salt": 7}, "cache_salt"),
        ({"prompt": "x", "multi_modal_data": {}}, "'multi_modal_data' is not supported"),
        (b"x", "bytes"),
        (None, "NoneType"),
    ],
)
def test_parse_prompt_refuses(prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_prompt(prompt)
