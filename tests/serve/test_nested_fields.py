"""Objects inside a request: an unknown field in any of them is refused by its path, in every API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.launch import LaunchedServer

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
SCHEMA = {"type": "object"}
OUT = {"name": "out", "schema": SCHEMA}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
HI = {"role": "user", "content": "Hi"}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI], "max_tokens": 2},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 2},
    MESSAGES: {"model": "smollm2", "messages": [HI], "max_tokens": 2},
    RESPONSES: {"input": "Hi", "max_output_tokens": 16},
}


def json_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {**OUT, **fields}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
    (CHAT, {"response_format": json_format() | {"x": 1}}, "response_format.x"),
    (CHAT, {"response_format": json_format(shema=SCHEMA)}, "response_format.json_schema.shema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema.name"),
    (CHAT, {"response_format": json_format(name="")}, "json_schema.name"),
    (CHAT, {"response_format": json_format(name="a b")}, "json_schema.name"),
    (CHAT, {"response_format": json_format(description=5)}, "json_schema.description"),
    (CHAT, {"response_format": {"type": "json_object", "json_schema": OUT}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "text", "json_schema": OUT}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    (CHAT, {"response_format": {}}, "response_format.type"),
    (COMPLETIONS, {"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    (COMPLETIONS, {"structured_outputs": {"json": SCHEMA, "strict": True}}, "structured_outputs.strict"),
    (CHAT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (CHAT, {"tools": [{**TOOL, "strict": True}]}, "tools[0].strict"),
    (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "schema": {}}}]}, "tools[0].function.schema"),
    (CHAT, {"tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "f", "x": 1}}}, "tool_choice.function.x"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}, "name": "f"}},
     "tool_choice.name"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}], "x": 1}}},
     "tool_choice.allowed_tools.x"),
    (CHAT, {"messages": [{**HI, "contents": "x"}]}, "messages[0].contents"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "txt": "y"}]}]}, "txt"),
    (CHAT, {"cache_control": {"type": "ephemeral", "tll": "1h"}}, "cache_control.tll"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA, "parameters": {}}]}, "parameters"),
    (MESSAGES, {"tool_choice": {"type": "auto", "x": 1}}, "tool_choice.x"),
    (MESSAGES, {"thinking": {"type": "disabled", "x": 1}}, "thinking.x"),
    (RESPONSES, {"text": {"format": {"type": "json_object", "x": 1}}}, "text.format.x"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", **OUT, "shema": {}}}}, "text.format.shema"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name"),
    (RESPONSES, {"text": {"form": {}}}, "text.form"),
    (RESPONSES, {"reasoning": {"efort": "low"}}, "reasoning.efort"),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION, "x": 1}]}, "tools[0].x"),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "function": {}}},
     "tool_choice"),
    (RESPONSES, {"input": [{**HI, "x": 1}]}, "input[0].x"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}]}, "y"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "named"), REFUSED, ids=str)
def test_an_unknown_field_anywhere_is_refused(
    server: LaunchedServer, path: str, fields: dict[str, Any], named: str
) -> None:
    answer = server.http.post(path, json={**BASES[path], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    path, _, field = named.rpartition(".")
    assert named in error["message"] or (path in error["message"] and repr(field) in error["message"]), error


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]},
     "messages[0].role must be one of 'user', 'assistant', 'system'; got 'tool'"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
     "messages[0].content[0].type must be one of 'text', 'thinking', 'tool_use', 'tool_result'; got 'image'"),
    (MESSAGES, {"thinking": {"type": "maybe"}}, "thinking.type must be one of 'enabled', 'disabled', 'adaptive'"),
    (MESSAGES, {"tools": [{"type": "web", "name": "w", "input_schema": {}}]}, "tools[0].type must be 'custom'"),
    (MESSAGES, {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]}]}, "must be 'text'"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type must be 'function'; got 'web_search'"),
    (RESPONSES, {"truncation": "some"}, "truncation must be one of 'auto', 'disabled'"),
    (RESPONSES, {"input": [{"role": "nobody", "content": "x"}]},
     "input[0].role must be one of 'user', 'assistant', 'system', 'developer'; got 'nobody'"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "'input_text', 'output_text', 'refusal'"),
    (RESPONSES, {"input": [{"type": "reasoning"}]}, "input has neither a message nor a call"),
    ("/cache/reset", {"all": True}, "unknown field 'all'"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "words"), WRONG, ids=str)
def test_a_value_that_is_none_of_the_known_ones(
    server: LaunchedServer, path: str, fields: dict[str, Any], words: str
) -> None:
    answer = server.http.post(path, json={**BASES.get(path, {}), **fields})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"], answer.text


TAKEN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"response_format": {"type": "text"}}),
    (CHAT, {"response_format": {"type": "text", "json_schema": None}}),
    (CHAT, {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]}),
    (CHAT, {"messages": [HI, {"role": "assistant", "content": "x", "refusal": None, "audio": None, "annotations": []},
                         HI]}),
    (CHAT, {"messages": [{**HI, "name": "Ann"}]}),
    (CHAT, {"messages": [{**HI, "mood": "good"}], "chat_template": "{{ messages[0].mood }}"}),
    (RESPONSES, {"text": {"format": {"type": "text"}}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), TAKEN, ids=str)
def test_what_is_known_is_taken(server: LaunchedServer, path: str, fields: dict[str, Any]) -> None:
    answer = server.http.post(path, json={**BASES[path], **fields})
    assert answer.status_code == 200, answer.text
