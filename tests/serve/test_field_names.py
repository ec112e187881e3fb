"""Errors name fields as the client does, in every API and spelling."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import CapacityError, GrammarError, RequestError
from headrace.serve.errors import ApiError
from headrace.serve.field_names import FieldNames
from tests.serve.launch import LaunchedServer

NAMES = FieldNames(
    {
        "stop": "stop_sequences",
        "max_tokens": "max_output_tokens",
        "a.b": "x",
        "a": "y",
        "tools[*].function": "tools[*]",
    },
    {"prompt": "messages"},
)


@pytest.mark.parametrize(
    ("message", "param", "new_message", "new_param"),
    [
        ("stop must be a list", "stop", "stop_sequences must be a list", "stop_sequences"),
        ("do not stop max_tokens", "n", "do not stop max_output_tokens", "n"),
        ("stop must be x; got 'stop'", "stop", "stop_sequences must be x; got 'stop'", "stop_sequences"),
        ("the prompt is empty", "prompt", "the prompt is empty", "messages"),
        ("a.b.c is wrong", "a.b.c", "x.c is wrong", "x.c"),
        ("a.c is wrong", "a.c", "a.c is wrong", "y.c"),
        ("tools[3].function.name is 5", "tools", "tools[3].name is 5", "tools"),
        (
            "min_tokens must not be above max_tokens",
            None,
            "min_tokens must not be above max_output_tokens",
            None,
        ),
    ],
)
def test_renaming(message: str, param: str | None, new_message: str, new_param: str | None) -> None:
    renamed = NAMES.rename(GrammarError(message, param=param, code="c"))
    assert (renamed.message, renamed.param, renamed.code) == (new_message, new_param, "c")
    assert isinstance(renamed, GrammarError)
    api = NAMES.rename(ApiError(413, message, param=param, headers={"A": "b"}))
    assert (api.status, api.message, api.param, api.headers) == (413, new_message, new_param, {"A": "b"})


def test_one_api_over_another() -> None:
    both = (
        FieldNames({"n": "best_of"})
        .then(FieldNames({"best_of": "tries"}))
        .then(FieldNames({"tries": "runs"}))
    )
    assert both.rename(RequestError("n must be 1", param="n")).message == "runs must be 1"
    with pytest.raises(CapacityError, match="runs"), both.spoken():
        raise CapacityError("n is too much", param="n")
    error = ValueError("n")
    assert both.rename(error) is error


HI = [{"role": "user", "content": "Hi"}]
CASES: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences must be", None),
    ("/v1/messages", {"stop_sequences": ["s"] * 99}, "stop_sequences has 99", None),
    ("/v1/messages", {"max_tokens": 10**7}, "max_tokens is 10000000", None),
    ("/v1/messages", {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", None),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema", None),
    ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens must be", "max_output_tokens"),
    ("/v1/responses", {"max_output_tokens": 10**7}, "max_output_tokens is", "max_output_tokens"),
    ("/v1/responses", {"text": {"format": {"type": "yaml"}}}, "text.format.type", "text.format"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "text.format"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "http://x"}}}},
     "schema #/$ref", "text.format"),
    ("/v1/responses", {"text": {"verbosity": "high"}}, "text.verbosity", "text.verbosity"),
    ("/v1/responses", {"input": [{"role": "nobody", "content": "x"}]}, "input[0].role", "input"),
    ("/v1/responses", {"input": "word " * 9000}, "max_model_len", "input"),
    ("/v1/responses", {"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "tools"),
    ("/v1/chat/completions", {"max_completion_tokens": 10**7}, "max_completion_tokens is", "max_completion_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 9000}]}, "max_model_len", "messages"),
    ("/v1/chat/completions", {"guided_regex": ""}, "guided_regex must be", "guided_regex"),
    ("/v1/chat/completions", {"guided_choice": [""]}, "guided_choice must be", "guided_choice"),
    ("/v1/chat/completions", {"guided_json": {"$ref": "http://x"}}, "schema #/$ref", "guided_json"),
    ("/v1/chat/completions",
     {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "http://x"}}}},
     "schema #/$ref", "response_format"),
    ("/v1/completions", {"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "structured_outputs"),
    ("/v1/completions", {"guided_regex": "a", "min_tokens": 2}, "guided_regex", "min_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "words", "param"), CASES, ids=str)
@pytest.mark.parametrize("is_stream", [False, True])
def test_fields_are_called_as_the_client_calls_them(
    masked: LaunchedServer, path: str, fields: dict[str, Any], words: str, param: str | None, is_stream: bool
) -> None:
    base: dict[str, Any] = {
        "/v1/messages": {"model": "smollm2", "messages": HI, "max_tokens": 4},
        "/v1/responses": {"input": "Hi"},
        "/v1/completions": {"prompt": "Hi"},
    }.get(path, {"messages": HI})
    answer = masked.http.post(path, json={**base, **fields, "stream": is_stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and "structured_outputs: " not in error["message"], error
    assert param is None or error["param"] == param, error
