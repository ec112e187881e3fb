"""Structured outputs over HTTP: a real engine core and real grammars over a made-up model that writes noise."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from tests.serve.launch import LaunchedServer

SMALL = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "ok": {"type": "boolean"}},
    "required": ["color", "ok"],
    "additionalProperties": False,
}
NAMED = {"name": "out", "schema": SMALL}
JSON_FIELDS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": False}}},
    {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    {"structured_outputs": {"json": SMALL}},
    {"structured_outputs": {"json": json.dumps(SMALL), "regex": None}},
    {"guided_json": SMALL},
]


def chat_text(answer: Any) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def is_small(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"color", "ok"}
        and value["color"] in ("red", "green", "blue")
        and value["ok"] in (True, False)
    )


@pytest.mark.parametrize("fields", JSON_FIELDS, ids=str)
def test_a_schema_in_every_spelling(masked: LaunchedServer, fields: dict[str, Any]) -> None:
    text, reason = chat_text(masked.chat("Go.", max_tokens=200, **fields))
    assert is_small(text) and reason == "stop"
    (choice,) = masked.complete("Go.", max_tokens=200, **fields).json()["choices"]
    assert is_small(choice["text"]) and choice["finish_reason"] == "stop"


def test_a_streamed_answer_adds_up(masked: LaunchedServer) -> None:
    body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 200, **JSON_FIELDS[0]}
    choices = [event["choices"][0] for event in masked.stream("/v1/chat/completions", **body)]
    assert is_small("".join(choice["delta"].get("content", "") for choice in choices))
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


def test_every_answer_of_n_and_of_a_batch(masked: LaunchedServer) -> None:
    answer = masked.complete(["a", "b"], n=3, temperature=1.0, max_tokens=200, guided_json=SMALL).json()
    assert len(answer["choices"]) == 6 and all(is_small(choice["text"]) for choice in answer["choices"])


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{3,9}x"}, "[a-c]{3,9}x"),
        ({"structured_outputs": {"regex": r"\d{2}:\d{2}"}}, r"\d{2}:\d{2}"),
        ({"guided_choice": ["ab", "abc", "b"]}, "ab|abc|b"),
        ({"structured_outputs": {"choice": ["only"]}}, "only"),
        ({"guided_grammar": 'root ::= "a" [0-9]{1,5} ("x" | "y")'}, "a[0-9]{1,5}[xy]"),
        ({"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}}, r"\(*x\)*"),
    ],
    ids=str,
)
def test_other_constraints(masked: LaunchedServer, fields: dict[str, Any], pattern: str) -> None:
    for number in range(4):
        text, reason = chat_text(masked.chat(f"Go {number}.", max_tokens=60, **fields))
        if reason == "stop":
            assert re.fullmatch(pattern, text), text


def test_json_object_is_an_object_or_the_beginning_of_one(masked: LaunchedServer) -> None:
    for number in (1, 6, 60):
        text, reason = chat_text(
            masked.chat("Go.", max_tokens=number, response_format={"type": "json_object"})
        )
        assert text.startswith("{") or (reason == "length" and number == 1)
        assert reason in ("stop", "length")


def test_a_structural_tag(masked: LaunchedServer) -> None:
    tag = {"begin": "<f=go>", "content": {"type": "json_schema", "json_schema": SMALL}, "end": "</f>"}
    form = {
        "type": "tags_with_separator",
        "tags": [tag],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": True,
    }
    text, reason = chat_text(
        masked.chat("Go.", max_tokens=200, response_format={"type": "structural_tag", "format": form})
    )
    assert reason == "stop" and text.startswith("<f=go>") and is_small(text[6:-4]) and text.endswith("</f>")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, ("guided_regex", "structured_outputs")),
        ({"guided_regex": "a", "guided_json": {}}, ("guided_regex", "guided_json")),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "b"}},
            ("response_format", "structured_outputs"),
        ),
    ],
)
def test_two_constraints_are_both_named(
    masked: LaunchedServer, fields: dict[str, Any], names: tuple[str, str]
) -> None:
    answer = masked.chat("Go.", **fields)
    assert answer.status_code == 400
    assert all(name in answer.json()["error"]["message"] for name in names)


@pytest.mark.parametrize("empty", [{}, {"json": None, "regex": None}, {"disable_any_whitespace": True}])
def test_a_constraint_that_says_nothing_is_no_free_text(masked: LaunchedServer, empty: Any) -> None:
    answer = masked.chat("Go.", structured_outputs=empty)
    assert answer.status_code == 400 and "exactly one of" in answer.json()["error"]["message"]


def test_special_tokens_of_a_tag_are_no_violation(masked: LaunchedServer) -> None:
    """The answer's text leaves them out, so it is not what the tag says; its tokens are."""
    special = "<|im_start|>"
    for value in (f"{special}abc", f"abc{special}"):
        form = {"type": "const_string", "value": value}
        answer = masked.chat("Go.", response_format={"type": "structural_tag", "format": form})
        assert chat_text(answer) == ("abc", "stop")


def test_as_many_choices_as_are_allowed(masked: LaunchedServer) -> None:
    choices = [f"c{number}" for number in range(10_000)]
    text, reason = chat_text(masked.chat("Go.", structured_outputs={"choice": choices}))
    assert text in choices and reason == "stop"


@pytest.mark.parametrize("stop", ["}", '"', "red", "e", ":"])
def test_stop_strings_do_not_cut_json(masked: LaunchedServer, stop: str) -> None:
    text, reason = chat_text(masked.chat("Go.", max_tokens=200, stop=[stop], **JSON_FIELDS[0]))
    assert is_small(text) and reason == "stop"


@pytest.mark.parametrize(
    ("fields", "stop", "wanted"),
    [
        ({"guided_regex": "ab{2}cd"}, ["cd"], "abbcd"),
        ({"guided_regex": "ab{2}(cde){3}"}, ["cd", "e"], "abbcdecdecde"),
        ({"guided_regex": "ab{2}(cd)?"}, ["cd"], "abb"),
        ({"guided_regex": "x(ab){2}y|x(ab){2}yz"}, ["b", "z", "ba"], "xababy"),
        ({"guided_grammar": 'start: "(" "a" ")"'}, [")"], "(a)"),
    ],
    ids=str,
)
def test_a_stop_string_ends_other_text_only_where_it_may_end(
    masked: LaunchedServer, fields: dict[str, Any], stop: list[str], wanted: str
) -> None:
    body = {"max_tokens": 60, "stop": stop, **fields}
    texts = {chat_text(masked.chat(f"Go {number}.", **body)) for number in range(4)}
    assert texts == {(wanted, "stop")}
    messages = [{"role": "user", "content": "Go."}]
    choices = [
        event["choices"][0] for event in masked.stream("/v1/chat/completions", messages=messages, **body)
    ]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == wanted
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "[a-z]+", "allowed_token_ids": [33]}, "allowed_token_ids"),
        ({"guided_json": SMALL, "allowed_token_ids": [0, 1, 2]}, "allowed_token_ids"),
        ({"guided_regex": "(a|b)(a|b)[0-9]", "allowed_token_ids": [81, 82]}, None),
        ({"guided_choice": ["a"], "bad_words": ["a"]}, "bad_words"),
        ({"guided_regex": "(a|b)(c|d)", "bad_words": ["c", "d", "ac", "ad", "bc", "bd"]}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_tokens_that_contradict_the_constraint_are_the_clients_mistake(
    masked: LaunchedServer, fields: dict[str, Any], param: str | None, is_stream: bool, n: int
) -> None:
    answer = masked.chat("Go.", max_tokens=60, stream=is_stream, n=n, **fields)
    if answer.status_code == 200:  # it began before the dead end, and may have been cut before it
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        (error,) = [event["error"] for event in events if "error" in event] if is_stream else [None]
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == "no_token_allowed", error
    assert error["param"] == param
    masked.wait_metric("num_requests_running", 0)


def test_words_and_tokens_may_be_forbidden_where_enough_is_left(masked: LaunchedServer) -> None:
    assert chat_text(masked.chat("Go.", max_tokens=9, guided_choice=["a", "b"], bad_words=["a"]))[0] == "b"
    body = {"max_tokens": 9, "guided_choice": ["yes", "no"], "allowed_token_ids": [10407]}
    assert chat_text(masked.chat("Go.", **body)) == ("yes", "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str)
@pytest.mark.parametrize(
    ("field", "value"),
    [("response_format", JSON_FIELDS[0]["response_format"]), ("response_format", {"type": "json_object"}),
     ("structured_outputs", {"regex": "a"}), ("guided_choice", ["a"]), ("guided_grammar", 'start: "a"')],
)  # fmt: skip
def test_a_text_and_a_call_cannot_both_be_asked_for(
    masked: LaunchedServer, choice: Any, field: str, value: Any
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SMALL}}
    answer = masked.chat("Go.", tools=[tool], tool_choice=choice, **{field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field and field in error["message"] and "tool_choice" in error["message"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [*[(fields, next(iter(fields))) for fields in JSON_FIELDS], ({"guided_regex": "a*"}, "guided_regex"),
     ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tools")],
    ids=str,
)  # fmt: skip
def test_min_tokens_and_beams_do_not_go_with_a_constraint(
    masked: LaunchedServer, fields: dict[str, Any], name: str
) -> None:
    for more, param in (({"min_tokens": 3}, "min_tokens"), ({"use_beam_search": True}, name)):
        answer = masked.chat("Go.", max_tokens=60, **more, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param and name in error["message"], error


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_one_token_is_cut_or_whole(masked: LaunchedServer, field: str) -> None:
    text, reason = chat_text(masked.chat("Go.", **{field: 1}, **JSON_FIELDS[0]))
    assert reason == "length" and '{"color'.startswith(text.replace(" ", "").replace("\n", ""))
    text, reason = chat_text(masked.chat("Go.", **{field: 1}, guided_choice=["a"]))
    assert text == "a" and reason in ("stop", "length")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "a(?=b)"}, "regex"),
    ({"guided_grammar": "start: foo"}, "foo"),
    ({"guided_grammar": "root ::= foo"}, "foo"),
    ({"guided_json": {"type": "object", "properties": {"a": {"pattern": "([a-z"}}}}, "pattern|regex"),
    ({"guided_json": {"$ref": "https://example.com/x"}}, "example.com"),
    ({"guided_json": False}, "false|nothing"),
    ({"structured_outputs": {"regex": "a", "backend": "xgrammar"}}, "xgrammar"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_cannot_be_compiled_is_a_400(
    masked: LaunchedServer, fields: dict[str, Any], message: str, is_stream: bool
) -> None:
    answer = masked.chat("Go.", max_tokens=20, stream=is_stream, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and re.search(message, error["message"]), error


def test_what_nobody_enforces_is_reported(masked: LaunchedServer) -> None:
    text = {"type": "string", "maxLength": 3, "format": "color"}
    schema = {**SMALL, "properties": {**SMALL["properties"], "hue": text}}
    notes = masked.chat("Go.", max_tokens=60, guided_json=schema).json()["structured_outputs"]["notes"]
    assert notes == ["#/properties/hue/format 'color' is not checked: it is taken as an annotation"]
    assert "structured_outputs" not in masked.chat("Go.", max_tokens=60, guided_json=SMALL).json()
    events = masked.stream("/v1/completions", prompt="Go.", max_tokens=60, guided_json=schema)
    assert events[0]["structured_outputs"]["notes"] == notes


def test_others_go_on_while_a_grammar_is_compiled(masked: LaunchedServer) -> None:
    huge = {"enum": [f"{number:x}" * 6 for number in range(8000)]}
    started = time.monotonic()
    answer = masked.chat("Go.", max_tokens=60, guided_json=huge)
    assert answer.status_code == 200 and json.loads(chat_text(answer)[0]) in huge["enum"]
    assert time.monotonic() - started < 20
