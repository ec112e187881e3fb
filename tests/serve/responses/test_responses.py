"""OpenAI's responses API: bodies, streams, refusals, and the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.serve.launch import LaunchedServer

PATH = "/v1/responses"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
    {"type": "function", "name": "get_time"},
]
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = "Let me see. " + ONE + '\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


def create(server: LaunchedServer, said: Any, **fields: Any) -> dict[str, Any]:
    given = f"SAY:{said}" if isinstance(said, str) else said
    answer = server.http.post(PATH, json={"model": "smollm2", "input": given, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.fixture
def client(parrot: LaunchedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=parrot.base + "/v1", api_key="none", max_retries=0, timeout=30)


def test_text(parrot: LaunchedServer) -> None:
    response = create(parrot, "Good day.", instructions="Be kind.", metadata={"a": "b"}, temperature=0)
    (message,) = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    (part,) = message["content"]
    assert part == {"type": "output_text", "text": "Good day.", "annotations": [], "logprobs": []}
    assert (
        response["object"] == "response" and response["status"] == "completed" and response["error"] is None
    )
    assert response["metadata"] == {"a": "b"} and response["instructions"] == "Be kind."
    usage = response["usage"]
    assert usage["output_tokens"] == 4 and usage["total_tokens"] == 4 + usage["input_tokens"]


def test_a_limit_leaves_it_incomplete(parrot: LaunchedServer) -> None:
    response = create(parrot, "One two three", max_output_tokens=2)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    call = create(parrot, ONE, tools=TOOLS, max_output_tokens=18)["output"][0]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_required_call_that_is_cut_is_no_message(masked: LaunchedServer, choice: Any) -> None:
    for limit in (1, 2, 3, 5, 8, 10):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_output_tokens": limit}
        response = create(masked, "", **fields)
        assert [item["type"] for item in response["output"]] in ([], ["function_call"])
        assert response["status"] == "incomplete"
        body = {"model": "smollm2", "input": "SAY:", "stream": True, **fields}
        lines = masked.http.post(PATH, json=body).text.split("\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        kinds = [event["type"] for event in events]
        assert "response.output_text.delta" not in kinds and kinds[-1] == "response.incomplete"


def test_calls_are_items_in_order(parrot: LaunchedServer) -> None:
    message, first, second = create(parrot, TWO, tools=TOOLS)["output"]
    assert message["content"][0]["text"] == "Let me see. "
    assert first["name"] == "get_weather" and json.loads(first["arguments"]) == {"city": "Paris"}
    assert second["name"] == "get_time" and second["arguments"] == "{}"
    assert len({message["id"], first["id"], second["id"], first["call_id"], second["call_id"]}) == 5
    assert len(create(parrot, TWO, tools=TOOLS, parallel_tool_calls=False)["output"]) == 2
    none = create(parrot, ONE, tools=TOOLS, tool_choice="none")
    assert none["output"][0]["content"][0]["text"] == ONE
    rules = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    kinds = [item["type"] for item in create(parrot, TWO, tools=TOOLS, tool_choice=rules)["output"]]
    assert kinds == ["message", "function_call"]


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("id", "call_id", "created_at", "item_id")
        return {
            key: without_ids(item) for key, item in value.items() if key not in hidden and item is not None
        }
    return [without_ids(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "text", [TWO, "Words.", ONE + " and then", '<tool_call>{"name": "nobody"}</tool_call>', ONE[:60]]
)
@pytest.mark.parametrize("limit", [200, 4, 17, 22])
def test_a_stream_adds_up(parrot: LaunchedServer, client: openai.OpenAI, text: str, limit: int) -> None:
    plain = create(parrot, text, tools=TOOLS, max_output_tokens=limit)
    tools: Any = TOOLS
    stream = client.responses.create(
        model="smollm2", input=f"SAY:{text}", tools=tools, max_output_tokens=limit, stream=True
    )
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]
    assert final.type == f"response.{plain['status']}"
    last = final.response.to_dict()  # type: ignore[union-attr]
    usage, streamed_usage = plain.pop("usage"), last.pop("usage")
    assert without_ids(last) == without_ids(plain)
    assert usage["output_tokens"] == streamed_usage["output_tokens"]  # type: ignore[index,call-overload]
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == last["output"]
    check_pieces(events, last["output"])


def check_pieces(events: list[Any], items: Any) -> None:
    """Deltas add up to the items."""
    texts = ["" for _ in items]
    for event in events:
        if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            texts[event.output_index] += event.delta
    for text, item in zip(texts, items, strict=True):
        assert text == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])


def test_official_stream_helper(client: openai.OpenAI) -> None:
    tools: Any = TOOLS
    with client.responses.stream(model="smollm2", input=f"SAY:{TWO}", tools=tools) as stream:
        final = stream.get_final_response()
    assert final.output_text == "Let me see. "
    assert [item.name for item in final.output if item.type == "function_call"] == ["get_weather", "get_time"]


def test_what_is_no_call_is_told(parrot: LaunchedServer) -> None:
    text = '<tool_call>{"name": "nobody"}</tool_call>'
    response = create(parrot, text, tools=TOOLS)
    assert response["output"][0]["content"][0]["text"] == text
    assert response["tool_parse_errors"][0]["code"] == "unknown_tool"


def test_reasoning(launch: Any) -> None:
    options = {"factory": "tests.serve.odd_cores:parrot", "core": {}, "server": {"reasoning_parser": "think"}}
    server = launch(**options).wait_ready()
    response = create(server, "<think>Hm, yes.</think>Yes.")
    thought, message = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, yes."}] and thought["summary"] == []
    assert message["content"][0]["text"] == "Yes."
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 5


def test_the_whole_conversation_is_put(parrot: LaunchedServer) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "18SAY:warm"},
    ]
    response = create(parrot, items, instructions="Be brief.", tools=TOOLS)
    assert response["output"][0]["content"][0]["text"].startswith("warm")
    again = create(parrot, [*items, *response["output"], {"role": "user", "content": "SAY:bye"}])
    assert again["output"][0]["content"][0]["text"] == "bye"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input"),
    ({"nonsense": 1}, "nonsense"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_refusals(parrot: LaunchedServer, fields: dict[str, Any], param: str) -> None:
    answer = parrot.http.post(PATH, json={"input": "SAY:x", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    "fields",
    [{"store": True}, {"truncation": "disabled"}, {"include": []}, {"user": "me"}, {"reasoning": {"effort": None}},
     {"text": {"format": {"type": "text"}}}, {"background": False}, {"service_tier": "auto"}],
    ids=str,
)  # fmt: skip
def test_harmless_fields_are_taken(parrot: LaunchedServer, fields: dict[str, Any]) -> None:
    assert create(parrot, "x", **fields)["store"] is False
