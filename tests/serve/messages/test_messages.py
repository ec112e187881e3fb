"""Anthropic's messages API: bodies, streams, errors, and its official client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.serve.launch import LaunchedServer

PATH = "/v1/messages"
TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"name": "get_time", "input_schema": {"type": "object"}},
]
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "n": [1, 2]}}\n</tool_call>'
TWO = "Let me see. " + ONE + '\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


def body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"SAY:{text}"}]
    return {"model": "smollm2", "max_tokens": 200, "messages": messages, **fields}


def create(server: LaunchedServer, text: str, **fields: Any) -> dict[str, Any]:
    answer = server.http.post(PATH, json=body(text, **fields))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events_of(server: LaunchedServer, text: str, **fields: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", PATH, json={**body(text, **fields), "stream": True}) as answer:
        assert answer.status_code == 200
        frames = "".join(answer.iter_text()).split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture
def client(parrot: LaunchedServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=parrot.base, api_key="none", max_retries=0, timeout=30)


def test_text(parrot: LaunchedServer) -> None:
    message = create(parrot, "Good day.")
    assert message["content"] == [{"type": "text", "text": "Good day."}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "smollm2")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["input_tokens"] > 5 and message["usage"]["output_tokens"] == 4


def test_why_it_ended(parrot: LaunchedServer) -> None:
    assert create(parrot, "One two three", max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = create(parrot, "One two three", stop_sequences=["two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert stopped["content"] == [{"type": "text", "text": "One "}]
    assert create(parrot, ONE, tools=TOOLS)["stop_reason"] == "tool_use"


def test_calls_are_blocks_in_order(parrot: LaunchedServer) -> None:
    text, first, second = create(parrot, TWO, tools=TOOLS)["content"]
    assert text == {"type": "text", "text": "Let me see. "}
    assert (first["name"], first["input"]) == ("get_weather", {"city": "Paris", "n": [1, 2]})
    assert (second["type"], second["name"], second["input"]) == ("tool_use", "get_time", {})
    assert first["id"] != second["id"]
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(create(parrot, TWO, tools=TOOLS, tool_choice=single)["content"]) == 2
    none = create(parrot, ONE, tools=TOOLS, tool_choice={"type": "none"})
    assert none["content"] == [{"type": "text", "text": ONE}]


@pytest.mark.parametrize(
    "text", [TWO, "Words.", ONE + " and then", '<tool_call>{"name": "nobody"}</tool_call>', ONE[:60]]
)
@pytest.mark.parametrize("limit", [200, 4, 17, 22])
def test_a_stream_adds_up(parrot: LaunchedServer, client: anthropic.Anthropic, text: str, limit: int) -> None:
    plain = create(parrot, text, tools=TOOLS, max_tokens=limit)
    messages: Any = [{"role": "user", "content": f"SAY:{text}"}]
    tools: Any = TOOLS
    with client.messages.stream(model="smollm2", max_tokens=limit, messages=messages, tools=tools) as stream:
        final = stream.get_final_message()
    fields = ("type", "text", "name", "input")
    blocks = [{k: getattr(block, k) for k in fields if hasattr(block, k)} for block in final.content]
    assert blocks == [{k: block[k] for k in fields if k in block} for block in plain["content"]]
    assert (final.stop_reason, final.stop_sequence) == (plain["stop_reason"], plain["stop_sequence"])
    assert final.usage.output_tokens == plain["usage"]["output_tokens"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_required_call_that_is_cut_is_no_text(masked: LaunchedServer, choice: dict[str, Any]) -> None:
    for limit in (1, 2, 3, 5, 8, 10):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": limit}
        message = create(masked, "", **fields)
        assert [block["type"] for block in message["content"]] in ([], ["tool_use"])
        assert message["stop_reason"] == "max_tokens"
        events = events_of(masked, "", **fields)
        starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert "text" not in [block["type"] for block in starts]
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_events_of_a_stream(parrot: LaunchedServer) -> None:
    events = events_of(parrot, TWO, tools=TOOLS)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0
    open_block = None
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        else:
            assert event["index"] == open_block
            if event["type"] == "content_block_stop":
                open_block = None
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["text", "tool_use", "tool_use"] and open_block is None
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_what_is_no_call_is_told(parrot: LaunchedServer) -> None:
    text = '<tool_call>{"name": "nobody"}</tool_call>'
    message = create(parrot, text, tools=TOOLS)
    assert message["content"] == [{"type": "text", "text": text}] and message["stop_reason"] == "end_turn"
    assert message["tool_parse_errors"][0]["code"] == "unknown_tool"
    (delta,) = [event for event in events_of(parrot, text, tools=TOOLS) if event["type"] == "message_delta"]
    assert delta["delta"]["tool_parse_errors"] == message["tool_parse_errors"]


def test_thinking(launch: Any) -> None:
    options = {"factory": "tests.serve.odd_cores:parrot", "core": {}, "server": {"reasoning_parser": "think"}}
    server = launch(**options).wait_ready()
    thought, text = create(server, "<think>Hm.</think>Yes.", thinking={"type": "adaptive"})["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Yes."}
    starts = [
        e["content_block"]["type"]
        for e in events_of(server, "<think>Hm.</think>Yes.")
        if "content_block" in e
    ]
    assert starts == ["thinking", "text"]


def test_the_whole_conversation_is_put(parrot: LaunchedServer) -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "18"}]},
                {"type": "tool_result", "tool_use_id": "t1", "content": "SAY:broken", "is_error": True},
                {"type": "text", "text": "So?SAY:done"},
            ],
        },
    ]
    message = create(
        parrot, "", messages=messages, system=[{"type": "text", "text": "Be brief."}], tools=TOOLS
    )
    assert message["content"] == [{"type": "text", "text": "done"}]
    ask = {"model": "smollm2", "messages": messages, "system": "Be brief.", "tools": TOOLS}
    count = parrot.http.post(PATH + "/count_tokens", json=ask).json()
    usage = message["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    fewer = parrot.http.post(PATH + "/count_tokens", json={**ask, "messages": messages[:1]}).json()
    assert fewer["input_tokens"] < count["input_tokens"]


def test_a_last_turn_of_the_assistant_is_gone_on_with(parrot: LaunchedServer) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I SAY:and more"}]
    assert create(parrot, "", messages=messages)["content"] == [{"type": "text", "text": "and more"}]


SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "ok": {"type": "boolean"}},
    "required": ["color", "ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "schema": SMALL}
FORMS = [{"output_config": {"format": FORM}}, {"output_format": FORM}]


def is_small(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"color", "ok"} and value["color"] in ("red", "green") and value["ok"] in (True, False)
    )


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_a_schema_for_the_text(masked: LaunchedServer, fields: dict[str, Any]) -> None:
    message = create(masked, "", **fields)
    (block,) = message["content"]
    assert block["type"] == "text" and is_small(block["text"]) and message["stop_reason"] == "end_turn"
    events = events_of(masked, "", **fields)
    assert is_small("".join(event["delta"].get("text", "") for event in events if "delta" in event))
    for seed in range(4):  # with tools: calls or such a text
        blocks = create(masked, f"{seed}", tools=TOOLS, **fields, max_tokens=400)["content"]
        assert all(block["type"] == "tool_use" or is_small(block["text"]) for block in blocks) and blocks
    ask = {"model": "smollm2", "messages": [{"role": "user", "content": "x"}]}
    counts = [masked.http.post(PATH + "/count_tokens", json=one).json() for one in (ask, {**ask, **fields})]
    assert counts[0] == counts[1] and counts[0]["input_tokens"] > 0


def test_a_schema_through_the_official_client(masked: LaunchedServer) -> None:
    client = anthropic.Anthropic(base_url=masked.base, api_key="none", max_retries=0, timeout=60)
    messages: Any = [{"role": "user", "content": "Go."}]
    config: Any = {"format": FORM}
    message = client.messages.create(model="smollm2", max_tokens=200, messages=messages, output_config=config)
    assert message.content[0].type == "text" and is_small(message.content[0].text)


@pytest.mark.parametrize(
    ("fields", "name"), [(FORMS[0], "output_config.format"), (FORMS[1], "output_format")]
)
def test_errors_of_a_schema_name_the_clients_field(
    masked: LaunchedServer, fields: dict[str, Any], name: str
) -> None:
    forced = masked.http.post(PATH, json=body("x", tools=TOOLS, tool_choice={"type": "any"}, **fields))
    wrong = json.loads(json.dumps(fields).replace('"boolean"', '"no-such-type"'))
    unfit = masked.http.post(PATH, json=body("x", **wrong))
    for answer, words in ((forced, name), (unfit, "schema #/properties/ok/type")):
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert words in message and "response_format" not in message and "structured_outputs" not in message


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"nonsense": 1}, "nonsense"),
    ({"temperature": 1.5}, "temperature"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": []}]}, "content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "thinking"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "tool_result"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ""),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "name"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "budget"),
    ({"thinking": {"type": "adaptive"}}, "thinking"),
    ({"top_k": -5}, "top_k"),
    ({"stop_sequences": [""]}, "stop"),
    ({"container": "c"}, "container"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}, "name": "x"}}}, "name"),
    ({"output_config": {"form": 1}}, "form"),
    ({"output_config": {"format": FORM}, "output_format": FORM}, "send one of them"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "word"), REFUSED, ids=str)
def test_refusals_have_anthropics_form(parrot: LaunchedServer, fields: dict[str, Any], word: str) -> None:
    answer = parrot.http.post(PATH, json=body("x", **fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert word in error["error"]["message"]


def test_errors_are_the_clients_types(
    parrot: LaunchedServer, client: anthropic.Anthropic, launch: Any
) -> None:
    messages: Any = [{"role": "user", "content": "SAY:x"}]
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(model="other", max_tokens=5, messages=messages)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="smollm2", max_tokens=10**7, messages=messages)
    assert parrot.http.post(PATH, content=b"{").json()["type"] == "error"
    keyed = launch(factory="tests.serve.odd_cores:parrot", core={}, server={"api_key": "sesame"}).wait_ready()
    stranger = anthropic.Anthropic(base_url=keyed.base, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="smollm2", max_tokens=5, messages=messages)
    friend = anthropic.Anthropic(base_url=keyed.base, api_key="sesame", max_retries=0)
    assert friend.messages.create(model="smollm2", max_tokens=5, messages=messages).content[0].type == "text"


def test_models_are_anthropics_objects_too(parrot: LaunchedServer, client: anthropic.Anthropic) -> None:
    body = parrot.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (body["object"], body["has_more"]) == ("list", False)
    assert (body["first_id"], body["last_id"]) == ("smollm2", "smollm2")
    (card,) = body["data"]
    assert (card["id"], card["object"], card["type"]) == ("smollm2", "model", "model")
    (model,) = list(client.models.list(limit=5))  # over all pages
    for found in (model, client.models.retrieve("smollm2")):
        assert (found.id, found.type, found.display_name) == ("smollm2", "model", "smollm2")
        assert int(found.created_at.timestamp()) == card["created"] and found.lifecycle == "active"
    assert type(model).model_validate(card).id == "smollm2"  # each field that the client's type demands


def test_official_client(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "SAY:" + ONE}]
    tools: Any = TOOLS
    message = client.messages.create(
        model="smollm2", max_tokens=100, messages=messages, tools=tools, extra_body={"temperature": 0}
    )
    (call,) = message.content
    assert call.type == "tool_use" and call.input == {"city": "Paris", "n": [1, 2]}
    assert client.messages.count_tokens(model="smollm2", messages=messages, tools=tools).input_tokens > 50
