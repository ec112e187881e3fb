"""Tool calls in chat completions, over a core that says what the test wants."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.serve.launch import LaunchedServer

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, CLOCK]
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
SPOKEN = [
    ONE, TWO, "Let me see. " + ONE, "Just words.",
    '<tool_call>{"name": "get_weather", "arguments": {"city": }}</tool_call>',
    '<tool_call>{"name": "nobody", "arguments": {}}</tool_call> or so', TWO + "<tool_call>{", ONE[:-20], "<tool_call>",
]  # fmt: skip


def say(server: LaunchedServer, text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"SAY:{text}"}], "tools": TOOLS, **fields}
    answer = server.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def folded(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A stream's choice, put together as clients do; checks the order and form of its deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    finish = None
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert finish is None, "a delta behind the end"
            finish = choice["finish_reason"]
            delta = choice["delta"]
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            if delta.get("reasoning_content"):
                message["reasoning_content"] = (
                    message.get("reasoning_content", "") + delta["reasoning_content"]
                )
            message.setdefault("tool_parse_errors", []).extend(delta.get("tool_parse_errors", []))
            for part in delta.get("tool_calls", []):
                add_call(message.setdefault("tool_calls", []), part)
    if not message["tool_parse_errors"]:
        del message["tool_parse_errors"]
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return {"message": message, "finish_reason": finish}


def add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    if part["index"] == len(calls):
        assert set(part) == {"index", "id", "type", "function"} and part["type"] == "function" and part["id"]
        assert part["function"] == {"name": part["function"]["name"], "arguments": ""}
        calls.append({"id": "", "type": "function", "function": dict(part["function"])})
        return
    assert part["index"] == len(calls) - 1 and set(part) == {"index", "function"}
    assert set(part["function"]) == {"arguments"} and part["function"]["arguments"]
    calls[-1]["function"]["arguments"] += part["function"]["arguments"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_a_call(parrot: LaunchedServer) -> None:
    choice = say(parrot, ONE)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert calls_of(choice) == [("get_weather", {"city": "Paris"})]
    assert calls_of(say(parrot, "Well: " + TWO)) == [("get_weather", {"city": "Paris"}), ("get_time", {})]
    ids = [call["id"] for call in say(parrot, TWO)["message"]["tool_calls"]]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("text", SPOKEN)
@pytest.mark.parametrize("limit", [None, 5, 12, 18])
def test_a_stream_adds_up_to_the_plain_answer(parrot: LaunchedServer, text: str, limit: int | None) -> None:
    fields = {"max_tokens": limit} if limit else {}
    plain = say(parrot, text, **fields)
    messages = [{"role": "user", "content": f"SAY:{text}"}]
    stream = folded(parrot.stream(CHAT, messages=messages, tools=TOOLS, **fields))
    assert stream["message"] == without_ids(plain["message"])
    assert stream["finish_reason"] == plain["finish_reason"]


def test_arguments_stream_in_pieces(parrot: LaunchedServer) -> None:
    text = ONE.replace("Paris", "a city " * 50)
    events = parrot.stream(CHAT, messages=[{"role": "user", "content": f"SAY:{text}"}], tools=TOOLS)
    parts = [p for e in events for c in e["choices"] for p in c["delta"].get("tool_calls", [])]
    assert len(parts) > 2 and [p["index"] for p in parts] == [0] * len(parts)
    assert events[-1]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls", "stop_reason": None
    }  # fmt: skip


def test_text_that_is_no_call_is_told_and_given(parrot: LaunchedServer) -> None:
    text = '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'
    choice = say(parrot, text)
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    (error,) = choice["message"]["tool_parse_errors"]
    assert (
        error["code"] == "unknown_tool" and "nobody" in error["message"] and error["tool_call_index"] is None
    )


def test_a_cut_call_ends_by_length(parrot: LaunchedServer) -> None:
    for limit in range(1, 20):
        choice = say(parrot, ONE, max_tokens=limit)
        assert choice["finish_reason"] == "length"
        assert "tool_parse_errors" not in choice["message"]


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_call_that_is_cut_is_never_content(masked: LaunchedServer, choice: Any) -> None:
    for limit in (1, 2, 3, 5, 8, 10):
        fields = {"max_tokens": limit, "tool_choice": choice, "seed": 1}
        plain = say(masked, "", **fields)
        message = plain["message"]
        assert not message["content"] and "tool_parse_errors" not in message, limit
        messages = [{"role": "user", "content": "SAY:"}]
        stream = folded(masked.stream(CHAT, messages=messages, tools=TOOLS, **fields))
        assert not stream["message"]["content"]
        assert stream["finish_reason"] == plain["finish_reason"] == "length"
        assert limit > 8 or "tool_calls" not in message


def test_a_cut_call_in_auto_is_content(parrot: LaunchedServer) -> None:
    for limit in range(1, 8):
        message = say(parrot, "Well. " + ONE, max_tokens=limit)["message"]
        assert ("Well. " + ONE).startswith(message["content"]) and message["content"], limit


def test_without_parallel_calls_the_answer_ends_behind_the_first(parrot: LaunchedServer) -> None:
    choice = say(parrot, TWO + " and more", parallel_tool_calls=False)
    assert calls_of(choice) == [("get_weather", {"city": "Paris"})]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


def test_tool_choice_none_leaves_text_alone(parrot: LaunchedServer) -> None:
    choice = say(parrot, ONE, tool_choice="none")
    assert choice["message"] == {"role": "assistant", "content": ONE, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_only_allowed_tools_are_called(parrot: LaunchedServer) -> None:
    rules = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = say(parrot, TWO, tool_choice={"type": "allowed_tools", "allowed_tools": rules})
    assert calls_of(choice) == [("get_time", {})]
    assert choice["message"]["tool_parse_errors"][0]["code"] == "unknown_tool"


def test_several_choices_and_logprobs(parrot: LaunchedServer) -> None:
    body = {"messages": [{"role": "user", "content": f"SAY:{ONE}"}], "tools": TOOLS, "n": 2, "logprobs": True}
    events = parrot.stream(CHAT, **body)
    plain = parrot.http.post(CHAT, json=body).json()
    for index, choice in enumerate(plain["choices"]):
        assert folded(events, index)["message"] == without_ids(choice["message"])
        entries = [
            entry for e in events for c in e["choices"] if c["index"] == index and c["logprobs"]
            for entry in c["logprobs"]["content"]
        ]  # fmt: skip
        assert entries == choice["logprobs"]["content"] and entries


def test_reasoning(launch: Any) -> None:
    options = {"factory": "tests.serve.odd_cores:parrot", "core": {}, "server": {"reasoning_parser": "think"}}
    server = launch(**options).wait_ready()
    text = f"<think>\nHm, {ONE}?\n</think>\n\nI see. {ONE}"
    choice = say(server, text)
    assert choice["message"]["reasoning_content"] == f"Hm, {ONE}?"
    assert choice["message"]["content"] == "I see. " and calls_of(choice) == [
        ("get_weather", {"city": "Paris"})
    ]
    events = server.stream(CHAT, messages=[{"role": "user", "content": f"SAY:{text}"}], tools=TOOLS)
    assert folded(events)["message"] == without_ids(choice["message"])
    plain = say(server, "<think>only thought", tools=None)["message"]
    assert plain["reasoning_content"] == "only thought" and plain["content"] == ""


def test_prompt_tells_of_tools_and_history(parrot: LaunchedServer) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "18 degrees"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
    ]
    body = {"messages": messages, "tools": TOOLS, "return_token_strs": True}
    text = "".join(parrot.http.post("/tokenize", json=body).json()["token_strs"])
    system, user, assistant, results, _ = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and json.dumps(CLOCK) in system
    assert assistant.count("<tool_call>") == 2 and '"arguments": {"city": "Rome"}' in assistant
    assert results.startswith(
        "<|im_start|>user\n<tool_response>\n18 degrees\n</tool_response>\n<tool_response>\nrain"
    )
    assert user == "<|im_start|>user\nWeather?"


def test_a_template_that_knows_tools_gets_them(parrot: LaunchedServer) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.x }}{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "seven"}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    body = {"messages": messages, "tools": TOOLS, "chat_template": template, "return_token_strs": True}
    text = "".join(parrot.http.post("/tokenize", json=body).json()["token_strs"])
    assert text == "get_weather;get_time;a<tool_call>seven"
    documents = parrot.chat(
        "SAY:x", chat_template="{{ documents[0].title }}SAY:no", documents=[{"title": "Title"}]
    )
    assert documents.json()["choices"][0]["message"]["content"] == "no"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [5]}, "tools"), ({"tools": [{}]}, "tools"), ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "<tool_call>"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 200}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
    ({"tools": [CLOCK, CLOCK]}, "tools"), ({"tools": [CLOCK] * 200}, "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"), ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": TOOLS, "guided_grammar": 'start: "x"'}, "guided_grammar"),
    ({"tools": [CLOCK], "tool_choice": "required", "chat_template": "{{ tools }}<start_function_call>"}, "tool_choice"),
    ({"tools": TOOLS, "chat_template": "{{ tools }}{{ messages }}"}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_what_is_refused(parrot: LaunchedServer, fields: dict[str, Any], param: str) -> None:
    answer = parrot.chat("SAY:x", **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and answer.json()["error"]["message"]


def test_official_client(parrot: LaunchedServer) -> None:
    client = openai.OpenAI(base_url=parrot.base + "/v1", api_key="none", max_retries=0, timeout=30)
    messages: Any = [{"role": "user", "content": f"SAY:Hm. {TWO}"}]
    answer = client.chat.completions.create(model="smollm2", messages=messages, tools=TOOLS)  # type: ignore[call-overload]
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == [
        "get_weather",
        "get_time",
    ]
    with client.chat.completions.stream(model="smollm2", messages=messages, tools=TOOLS) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "Hm. "
    calls = final.message.tool_calls
    assert calls is not None
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("get_weather", {"city": "Paris"}), ("get_time", {})
    ]  # fmt: skip


SMALL = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CHOOSY = {"type": "function", "function": {"name": "get_weather", "parameters": SMALL, "strict": True}}
TIMER = {
    "type": "function",
    "function": {"name": "set_timer", "parameters": {"type": "object", "maxProperties": 0}},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def is_small(arguments: Any) -> bool:
    return (
        set(arguments) == {"city", "unit"}
        and arguments["city"] in ("Paris", "Rome")
        and arguments["unit"] in "CF"
    )


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_that_are_asked_for_match_their_schemas(masked: LaunchedServer, choice: Any) -> None:
    for number in range(6):
        body = {
            "tools": [TIMER, CHOOSY],
            "tool_choice": choice,
            "max_tokens": 1500,
            "parallel_tool_calls": False,
        }
        answer = masked.chat(f"Weather {number}?", **body)
        assert answer.status_code == 200, answer.text
        (own,) = answer.json()["choices"]
        assert own["finish_reason"] == "tool_calls" and own["message"]["content"] is None, own
        ((name, arguments),) = calls_of(own)
        assert is_small(arguments) if name == "get_weather" else (choice == "required" and arguments == {})


def test_a_required_call_is_streamed_alike(masked: LaunchedServer) -> None:
    body = {"tools": [CHOOSY], "tool_choice": "required", "max_tokens": 300, "temperature": 0}
    messages = [{"role": "user", "content": "Weather?"}]
    plain = masked.chat(messages, **body).json()["choices"][0]
    stream = folded(masked.stream(CHAT, messages=messages, **body))
    assert stream["message"] == without_ids(plain["message"])
    for limit in (1, 4, 9, 14):
        cut = masked.chat(messages, **{**body, "max_tokens": limit}).json()["choices"][0]
        assert cut["finish_reason"] == "length"
        stream = folded(masked.stream(CHAT, messages=messages, **{**body, "max_tokens": limit}))
        assert stream["finish_reason"] == "length" and stream["message"] == without_ids(cut["message"])


def test_a_constrained_text_beside_tools_is_such_a_text_or_a_call(masked: LaunchedServer) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "out", "schema": schema}}
    seen = set()
    for number in range(8):
        body = {"tools": [CHOOSY], "response_format": form, "max_tokens": 300, "parallel_tool_calls": False}
        own = masked.chat(f"So {number}?", **body).json()["choices"][0]
        seen.add(own["finish_reason"])
        if own["finish_reason"] == "tool_calls":
            assert all(is_small(arguments) for _, arguments in calls_of(own))
        else:
            assert set(json.loads(own["message"]["content"])) == {"ok"}
    assert seen <= {"stop", "tool_calls"}


def test_a_schema_that_cannot_be_enforced_is_named_in_the_words_of_the_request(
    masked: LaunchedServer,
) -> None:
    bad = {"type": "object", "properties": {"x": {"$ref": "https://example.com/x.json"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    answer = masked.chat("x", tools=[TIMER, tool], tool_choice="required", max_tokens=5)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tools" and error["message"].startswith("tools"), error
    assert masked.chat("x", tools=[TIMER, tool], max_tokens=5).status_code == 200


def test_required_calls_of_the_other_apis(masked: LaunchedServer) -> None:
    tool = {"name": "get_weather", "input_schema": SMALL}
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "smollm2", "max_tokens": 1500, "messages": messages, "tools": [tool]}
    single = {"disable_parallel_tool_use": True}
    for choice in ({"type": "any", **single}, {"type": "tool", "name": "get_weather"}):
        message = masked.http.post("/v1/messages", json={**body, "tool_choice": choice}).json()
        assert message["stop_reason"] == "tool_use", message
        assert all(is_small(block["input"]) for block in message["content"])
    own = {"type": "function", "name": "get_weather", "parameters": SMALL}
    ask = {"input": "x", "tools": [own], "tool_choice": {"type": "function", "name": "get_weather"}}
    (call,) = masked.http.post("/v1/responses", json=ask).json()["output"]
    assert is_small(json.loads(call["arguments"]))
    schema = {"type": "json_schema", "name": "out", "schema": SMALL, "strict": True}
    (text,) = masked.http.post("/v1/responses", json={"input": "x", "text": {"format": schema}}).json()[
        "output"
    ]
    assert is_small(json.loads(text["content"][0]["text"]))
