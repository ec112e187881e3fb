from __future__ import annotations

from typing import Any

import pytest

from tests.serve.launch import LaunchedServer


def content_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        c["delta"].get("content") or "" for e in events for c in e["choices"] if c["index"] == index
    )


def prompt_tokens(server: LaunchedServer, messages: list[dict[str, Any]], **fields: Any) -> int:
    answer = server.chat(messages, max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


def test_plain_answer(server: LaunchedServer) -> None:
    answer = server.chat("Count.", max_tokens=5).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 5


def test_stream_adds_up_and_ends_once(server: LaunchedServer) -> None:
    messages = [{"role": "user", "content": "Count."}]
    plain = server.chat("Count.", max_tokens=20).json()["choices"][0]["message"]["content"]
    events = server.stream("/v1/chat/completions", messages=messages, max_tokens=20)
    assert content_of(events) == plain
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["length"]
    assert events[-1]["choices"][0]["delta"] == {}
    assert all(e["choices"] and "usage" not in e for e in events)


def test_stream_of_several_choices(server: LaunchedServer) -> None:
    messages = [{"role": "user", "content": "Count."}]
    plain = server.chat("Count.", max_tokens=6, n=3).json()
    events = server.stream("/v1/chat/completions", messages=messages, max_tokens=6, n=3)
    for index in range(3):
        assert content_of(events, index) == plain["choices"][index]["message"]["content"]
    assert plain["usage"]["completion_tokens"] == 18


@pytest.mark.parametrize("extra", [{}, {"top_logprobs": 0}])
def test_logprobs_without_top(server: LaunchedServer, extra: dict[str, Any]) -> None:
    choice = server.chat("Hi", max_tokens=4, logprobs=True, **extra).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [e["top_logprobs"] for e in entries] == [[]] * 4
    assert bytes(b for e in entries for b in e["bytes"]).decode() == choice["message"]["content"]


def test_logprobs_in_a_stream(server: LaunchedServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 1,
    }
    plain = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    events = server.stream("/v1/chat/completions", **body)
    assert [
        x for e in events for c in e["choices"] for x in (c["logprobs"] or {"content": []})["content"]
    ] == plain
    assert plain[0]["top_logprobs"][0]["token"] == plain[0]["token"]


def test_content_parts_equal_text(server: LaunchedServer) -> None:
    text = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in text]
    assert prompt_tokens(server, text) == prompt_tokens(server, parts)


def test_final_message_is_continued(server: LaunchedServer) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}]
    ended = prompt_tokens(server, messages)
    continued = prompt_tokens(server, messages, continue_final_message=True, add_generation_prompt=False)
    assert continued < ended
    assert continued == prompt_tokens(server, messages, continue_final_message=True)
    both = server.chat(messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"


def test_developers_speak_as_the_system_where_the_template_knows_none(server: LaunchedServer) -> None:
    question = {"role": "user", "content": "Count."}
    system = prompt_tokens(server, [{"role": "system", "content": "Be brief."}, question])
    assert prompt_tokens(server, [{"role": "developer", "content": "Be brief."}, question]) == system


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_tool_turns_in_the_history_are_taken(server: LaunchedServer, content: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "Call."},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "1", "content": "18"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert server.chat(messages, max_tokens=2).status_code == 200
    assert server.chat(messages, max_tokens=2, tools=tools, tool_choice="none").status_code == 200


def test_max_completion_tokens_wins(server: LaunchedServer) -> None:
    assert server.chat("Hi", max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3
    both = server.chat("Hi", max_tokens=9, max_completion_tokens=4).json()
    assert both["usage"]["completion_tokens"] == 4


def test_without_a_limit_the_context_is_filled(server: LaunchedServer) -> None:
    usage = server.chat("Hi").json()["usage"]
    assert usage["total_tokens"] == 8192


def test_template_of_the_request(server: LaunchedServer) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tail }}"
    body = {"messages": [{"role": "user", "content": "a b"}], "chat_template": template}
    tail = {"chat_template_kwargs": {"tail": " c"}}
    tokens = server.http.post("/tokenize", json={**body, **tail, "return_token_strs": True}).json()
    assert "".join(tokens["token_strs"]) == "a b c"
    endless = "{% for x in range(10**9) %}{% endfor %}"
    assert server.chat("Hi", chat_template=endless).status_code == 400
    assert server.chat("Hi", chat_template="{{ messages.__class__ }}").status_code == 400
    assert server.chat("Hi", chat_template_kwargs={"messages": []}).status_code == 400


def test_token_ids_of_vllm(server: LaunchedServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "return_token_ids": True}
    plain = server.http.post("/v1/chat/completions", json=body).json()
    assert len(plain["choices"][0]["token_ids"]) == 3
    assert len(plain["prompt_token_ids"]) == plain["usage"]["prompt_tokens"]
    events = server.stream("/v1/chat/completions", **body)
    choices = [c for e in events for c in e["choices"]]
    assert [t for c in choices for t in c.get("token_ids", [])] == plain["choices"][0]["token_ids"]
    assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [plain["prompt_token_ids"]]
