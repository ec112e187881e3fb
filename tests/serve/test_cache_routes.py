"""The prefix cache over HTTP: looking, explaining, pinning, forgetting; cache_control of requests."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import ModelConfig
from headrace.engine.front_end import FrontEnd
from headrace.serve.cache_control import without_controls
from headrace.serve.cache_routes import CachePrompt, _parse, reset_cache
from headrace.serve.chat_plan import plan_chat
from headrace.serve.context import tokenizer_of
from headrace.serve.prompts import chat_prompt
from headrace.serve.protocol import ChatRequest
from headrace.serve.settings import ServerConfig
from headrace.tokenizer import Tokenizer
from tests.serve.launch import LaunchedServer

TEXT = "The headrace carries water from the weir to the wheel of the mill. "


def post(server: LaunchedServer, path: str, **body: Any) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_prompt_is_explained_pinned_and_forgotten(masked: LaunchedServer) -> None:
    post(masked, "/cache/reset")
    assert post(masked, "/cache/explain", prompt=TEXT)["reason"] == "nothing_cached"
    assert masked.complete(TEXT * 3, max_tokens=2).status_code == 200
    report = post(masked, "/cache/explain", prompt=TEXT * 3)
    assert report["reason"] == "whole_prompt"
    assert report["num_cached_tokens"] == report["num_prompt_tokens"] - 1
    changed = post(masked, "/cache/explain", prompt=TEXT * 2 + "But not today, said the miller to the wheel.")
    assert changed["reason"] == "different_token" and changed["position"] > 0
    assert changed["cached_token"]["text"] and changed["prompt_token"]["text"]
    assert changed["cached_token"]["id"] != changed["prompt_token"]["id"]
    assert post(masked, "/cache/explain", prompt=TEXT * 3, cache_salt="tenant")["reason"] == "salt"
    pinned = post(masked, "/cache/pin", prompt=TEXT * 3, ttl="1h")
    assert pinned["num_pinned_tokens"] > 0
    tree = masked.http.get("/cache", params={"max_nodes": 5}).json()
    assert tree["num_pins"] == 1 and tree["num_cached_blocks"] > 0
    assert tree["nodes"][0]["text"].startswith("The headrace")
    assert post(masked, "/cache/unpin", prompt=TEXT * 3) == {"was_pinned": True}
    assert post(masked, "/cache/reset") == {"is_empty": True, "num_files_left": 0}
    assert masked.http.get("/cache").json()["nodes"] == []


def test_salted_text_is_not_shown(masked: LaunchedServer) -> None:
    post(masked, "/cache/reset")
    assert masked.complete(TEXT * 2, max_tokens=2, cache_salt="tenant").status_code == 200
    nodes = masked.http.get("/cache").json()["nodes"]
    assert nodes and all(node["text"] is None and node["is_salted"] for node in nodes)


HOUR = {"type": "ephemeral", "ttl": "1h"}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ASKED = {"role": "user", "content": TEXT * 2}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def chat(*messages: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [ASKED, *messages], "max_tokens": 2, **fields}


def anthropic(*messages: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    return MESSAGES, {"model": "smollm2", "messages": [ASKED, *messages], "max_tokens": 2, **fields}


def carriers(control: Any) -> list[tuple[str, tuple[str, dict[str, Any]]]]:
    """(path of the control, route and body) of every place where a request may carry one."""
    part = {"type": "text", "text": "Hi", "cache_control": control}
    called = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "cache_control": control}]}
    inside = {**CALL, "function": {**CALL["function"], "cache_control": control}}  # type: ignore[dict-item]
    own_tool = {"name": "weather", "input_schema": {"type": "object"}}
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1"}
    answered = [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{**result, "content": [part]}]},
    ]
    return [
        ("", ("/v1/completions", {"prompt": TEXT * 2, "max_tokens": 2, "cache_control": control})),
        ("", chat(cache_control=control)),
        ("messages[1].", chat({"role": "user", "content": "Hi", "cache_control": control})),
        ("messages[1].content[0].", chat({"role": "user", "content": [part]})),
        ("messages[1].content[0].", chat({"role": "tool", "tool_call_id": "call_1", "content": [part]})),
        ("messages[1].tool_calls[0].", chat(called)),
        ("messages[1].tool_calls[0].function.", chat({**called, "tool_calls": [inside]})),
        ("tools[0].", chat(tools=[{**TOOL, "cache_control": control}])),
        ("", anthropic(cache_control=control)),
        ("system[0].", anthropic(system=[part])),
        ("messages[1].content[0].", anthropic({"role": "user", "content": [part]})),
        ("messages[1].content[0].", anthropic({"role": "assistant", "content": [{**use, "cache_control": control}]})),
        ("messages[2].content[0].content[0].", anthropic(*answered)),
        ("messages[2].content[0].", anthropic(answered[0], {"role": "user", "content": [
            {**result, "content": "wet", "cache_control": control}]})),
        ("tools[0].", anthropic(tools=[{**own_tool, "cache_control": control}])),
    ]  # fmt: skip


@pytest.mark.parametrize("place", range(len(carriers(None))))
def test_a_control_anywhere_pins_the_prompt(masked: LaunchedServer, place: int) -> None:
    post(masked, "/cache/reset")
    where, (path, body) = carriers(HOUR)[place]
    post(masked, path, **body)
    assert masked.http.get("/cache").json()["num_pins"] == 1, (path, where)
    post(masked, "/cache/reset")


@pytest.mark.parametrize("place", range(len(carriers(None))))
def test_a_control_is_no_text_of_the_prompt(masked: LaunchedServer, place: int) -> None:
    _, (path, body) = carriers(HOUR)[place]
    counted = []
    for fields in (body, without_controls(body)):
        post(masked, "/cache/reset")
        usage = post(masked, path, **fields)["usage"]
        counted.append(usage.get("prompt_tokens", usage.get("input_tokens")))
    assert counted[0] == counted[1] is not None
    post(masked, "/cache/reset")


WRONG_CONTROLS = [
    ({"type": "forever"}, ".type"),
    ({"type": "ephemeral", "ttl": "2h"}, ".ttl"),
    ({"type": "ephemeral", "ttl": ["1h"]}, ".ttl"),
    ({"ttl": "1h"}, ".type"),
    ("yes", ""),
    (5, ""),
]


@pytest.mark.parametrize("place", range(len(carriers(None))))
@pytest.mark.parametrize(("control", "field"), WRONG_CONTROLS, ids=str)
def test_a_wrong_control_anywhere_is_refused_by_its_path(
    server: LaunchedServer, place: int, control: Any, field: str
) -> None:
    where, (path, body) = carriers(control)[place]
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert f"{where}cache_control{field} must be" in error["message"], error
    if path != MESSAGES:  # whose errors name no field
        assert error["param"] == f"{where}cache_control"


@pytest.mark.parametrize("path", ["/tokenize", "/cache/explain", "/cache/pin", "/cache/unpin", "count"])
def test_routes_beside_generation_refuse_a_wrong_control_too(server: LaunchedServer, path: str) -> None:
    tool = {**TOOL, "cache_control": {"type": "ephemeral", "ttl": "2h"}}
    body: dict[str, Any] = {"messages": [ASKED], "tools": [tool]}
    if path == "count":
        path = "/v1/messages/count_tokens"
        body |= {"model": "smollm2", "tools": [{"name": "f", "input_schema": {}, "cache_control": "yes"}]}
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400 and "tools[0].cache_control" in answer.text, answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "cache_control": HOUR}}]}),
        ("/v1/responses", {"cache_control": HOUR}),
        ("/v1/responses", {"tools": [{"type": "function", **FUNCTION, "cache_control": HOUR}]}),
        ("/v1/responses", {"input": [{**ASKED, "cache_control": HOUR}]}),
    ],
    ids=str,
)
def test_where_no_control_belongs_it_is_refused(
    server: LaunchedServer, path: str, fields: dict[str, Any]
) -> None:
    base: dict[str, Any] = {"messages": [ASKED]} if path == CHAT else {"input": "Hi"}
    answer = server.http.post(path, json={**base, **fields})
    assert answer.status_code == 400 and "cache_control" in answer.text, answer.text


def test_schemas_and_arguments_may_have_a_field_of_that_name(masked: LaunchedServer) -> None:
    post(masked, "/cache/reset")
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    called = {"type": "tool_use", "id": "a", "name": "weather", "input": {"cache_control": "no-store"}}
    path, body = chat(tools=[tool])
    post(masked, path, **body)
    path, body = anthropic({"role": "assistant", "content": [called]})
    post(masked, path, **body)
    assert masked.http.get("/cache").json()["num_pins"] == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/cache/explain", {}, "prompt"),
        ("/cache/explain", {"prompt": "a", "messages": []}, "prompt"),
        ("/cache/explain", {"prompt": ["a", "b"]}, "prompt"),
        ("/cache/pin", {"prompt": "a", "ttl": "1y"}, "ttl"),
        ("/cache/pin", {"prompt": "a", "ttl_s": 0}, "ttl_s"),
        ("/cache/pin", {"prompt": "a", "ttl_s": 1e9}, "ttl_s"),
        ("/cache/pin", {"prompt": "a", "ttl": ""}, "ttl"),
        ("/cache/pin", {"prompt": "a", "ttl": "1h", "ttl_s": 5}, "ttl"),
        ("/cache/pin", {"prompt": "a", "tl": "1h"}, "tl"),
        ("/cache/explain", {"prompt": "a", "ttl": "1h"}, "ttl"),
        ("/cache/unpin", {"prompt": "a", "ttl_s": 5}, "ttl_s"),
        ("/cache/explain", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/cache/pin", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/cache/unpin", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ],
)
def test_mistakes_are_told(masked: LaunchedServer, path: str, body: dict[str, Any], param: str) -> None:
    answer = masked.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


NO_PROMPTS = [
    ("", "the prompt is empty"),
    ([], "prompt is an empty list"),
    ([[]], "the prompt is empty"),
    ([1, 49152], "prompt has token id 49152; the model's vocabulary is [0, 49151]: tokenize"),
    ([-1], "prompt has token id -1"),
    ([1, 2**40], f"prompt has token id {2**40}"),
    ([1] * 8192, "at most 8192 (max_model_len): shorten it"),
    ([True], "prompt must be"),
    (["a", 1], "prompt must be"),
    (5, "prompt must be"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/cache/explain", "/cache/pin", "/cache/unpin"])
@pytest.mark.parametrize(("prompt", "words"), NO_PROMPTS, ids=lambda value: repr(value)[:20])
def test_what_no_request_may_have_as_its_prompt_is_refused_everywhere(
    masked: LaunchedServer, path: str, prompt: Any, words: str
) -> None:
    post(masked, "/cache/reset")
    fields = {"cache_control": HOUR} if path == "/v1/completions" else {}
    answer = masked.http.post(path, json={"prompt": prompt, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["param"] == "prompt"
    assert masked.http.get("/cache").json()["num_pins"] == 0, "what was refused is not pinned"


def test_detokenize_refuses_ids_that_the_model_lacks(server: LaunchedServer) -> None:
    for wrong in (-1, 49152, 2**70):
        answer = server.http.post("/detokenize", json={"tokens": [1, wrong]})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (
            error["param"] == "tokens"
            and f"{wrong}; the model's vocabulary is [0, 49151]: " in error["message"]
        )


@pytest.mark.parametrize("path", [CHAT, "/cache/explain"])
def test_special_tokens_are_added_to_a_chat_as_its_request_has_them(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    front_end = FrontEnd.open(ModelConfig(model="smollm2"))
    asked: list[bool] = []

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)  # the model has none of its own, so ids would not tell
        return [1]

    monkeypatch.setattr(type(front_end.tokenizer), "encode", encode)
    context: Any = SimpleNamespace(config=ServerConfig())
    for wanted in (True, False, None):
        if path == CHAT:
            request = ChatRequest(messages=[ASKED], add_special_tokens=wanted)
            plan = plan_chat(request, tokenizer_of(front_end), ServerConfig())
            asked.clear()
            chat_prompt(request, front_end, plan)
        else:
            asked.clear()
            _parse(CachePrompt(messages=[ASKED], add_special_tokens=wanted), front_end, context)
        assert asked == [bool(wanted)]


def test_wrong_sizes_of_the_tree_are_refused(server: LaunchedServer) -> None:
    for text in ("0", "-1", "x", "99999999999"):
        assert server.http.get("/cache", params={"max_nodes": text}).status_code == 400


def test_hits_of_each_tier_are_counted(masked: LaunchedServer) -> None:
    for name in ("prefix_cache_hits_total", "host_cache_hits_total", "disk_cache_hits_total"):
        assert masked.metric(name) >= 0


def test_gauges_tell_what_was_pinned_and_forgotten_at_once(masked: LaunchedServer) -> None:
    post(masked, "/cache/reset")
    assert masked.complete(TEXT * 4, max_tokens=2).status_code == 200
    masked.wait_metric("num_kv_blocks_held", 0)
    num_cached = masked.metric("num_kv_blocks_cached")
    assert num_cached > 0
    post(masked, "/cache/pin", prompt=TEXT * 4)
    num_held = masked.metric("num_kv_blocks_held")
    assert num_held > 0 and masked.metric("num_kv_blocks_cached") == num_cached - num_held
    post(masked, "/cache/unpin", prompt=TEXT * 4)
    assert masked.metric("num_kv_blocks_held") == 0
    post(masked, "/cache/reset")
    assert masked.metric("num_kv_blocks_cached") == 0


def test_gauges_tell_that_a_pin_is_over_without_a_step(masked: LaunchedServer) -> None:
    assert masked.complete(TEXT * 4, max_tokens=2).status_code == 200
    post(masked, "/cache/pin", prompt=TEXT * 4, ttl_s=0.2)
    assert masked.metric("num_kv_blocks_held") > 0
    masked.wait_metric("num_kv_blocks_held", 0)


def test_a_reset_waits_for_the_disk_and_tells_of_files_that_stay() -> None:
    left = {"is_done": True, "num_files_left": 2, "files_left_reason": "Read-only file system"}
    replies = [{"is_empty": True}, {"is_done": False}, {"is_done": False}, left]

    async def call_cache(action: str) -> dict[str, Any]:
        return replies.pop(0)

    context: Any = SimpleNamespace(llm=SimpleNamespace(call_cache=call_cache))
    request: Any = None
    answer = asyncio.run(reset_cache(context, request, b""))
    assert json.loads(bytes(answer.body)) == {
        "is_empty": True,
        "num_files_left": 2,
        "files_left_reason": "Read-only file system",
    }
