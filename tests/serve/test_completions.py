from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.launch import LaunchedServer

COUNT = "1, 2, 3, 4, "


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


def test_plain_answer(server: LaunchedServer) -> None:
    answer = server.complete([5] * 12, max_tokens=6).json()
    assert answer["object"] == "text_completion" and answer["model"] == "smollm2"
    assert answer["choices"] == [
        {"index": 0, "text": "1, 2, ", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 6,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_default_is_sixteen_tokens(server: LaunchedServer) -> None:
    assert server.complete().json()["usage"]["completion_tokens"] == 16


def test_stream_adds_up_to_the_plain_answer(server: LaunchedServer) -> None:
    plain = server.complete("Go", max_tokens=30).json()["choices"][0]["text"]
    events = server.stream("/v1/completions", prompt="Go", max_tokens=30)
    assert text_of(events) == plain
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["length"]
    assert len({e["id"] for e in events}) == 1 and {e["object"] for e in events} == {"text_completion"}
    assert not any("usage" in e for e in events)


def test_stream_usage(server: LaunchedServer) -> None:
    events = server.stream(
        "/v1/completions", prompt=[7] * 5, max_tokens=9, stream_options={"include_usage": True}
    )
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens"] == 5 and events[-1]["usage"]["completion_tokens"] == 9
    assert all(e["usage"] is None for e in events[:-1])


def test_running_usage(server: LaunchedServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream("/v1/completions", prompt="Go", max_tokens=5, stream_options=options)
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[-1] == 5


def test_batches_times_n_in_order(server: LaunchedServer) -> None:
    lengths = [[5] * 12, [5] * 15]
    answer = server.complete(lengths, max_tokens=3, n=2).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == ["1, ", ", 2", "2, ", ", 3"]
    assert answer["usage"]["prompt_tokens"] == 27 and answer["usage"]["completion_tokens"] == 12
    events = server.stream("/v1/completions", prompt=lengths, max_tokens=3, n=2)
    assert [text_of(events, i) for i in range(4)] == ["1, ", ", 2", "2, ", ", 3"]


@pytest.mark.parametrize("prompt", ["Hello 42", ["Hello 42"], [19556, 216, 36, 34], [[19556, 216, 36, 34]]])
def test_prompt_forms_agree(server: LaunchedServer, prompt: Any) -> None:
    answer = server.complete(prompt, max_tokens=4).json()
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["choices"][0]["text"] == server.complete([5] * 4, max_tokens=4).json()["choices"][0]["text"]


def test_stop_strings_over_token_edges(server: LaunchedServer) -> None:
    prompt = [5] * 12
    got = server.complete(prompt, max_tokens=40, stop=[", 3"]).json()["choices"][0]
    assert (got["text"], got["finish_reason"], got["stop_reason"]) == ("1, 2", "stop", ", 3")
    kept = server.complete(prompt, max_tokens=40, stop=", 3", include_stop_str_in_output=True).json()
    assert kept["choices"][0]["text"] == "1, 2, 3"
    events = server.stream("/v1/completions", prompt=prompt, max_tokens=40, stop=[", 3"])
    assert text_of(events) == "1, 2"
    held = server.stream("/v1/completions", prompt=prompt, max_tokens=5, stop=[", 2,\u2603"])
    assert text_of(held) == "1, 2,"


def test_logprobs_lists_join_to_the_text(server: LaunchedServer) -> None:
    answer = server.complete([5] * 12, max_tokens=5, logprobs=3).json()["choices"][0]
    lists = answer["logprobs"]
    assert lists["tokens"] == ["1", ",", " ", "2", ","] and lists["text_offset"] == [0, 1, 2, 3, 4]
    assert lists["token_logprobs"] == [-0.5] * 5 and lists["top_logprobs"][0] == {"1": -0.5}


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_in_a_stream(server: LaunchedServer, num_top: int) -> None:
    lists = server.complete([5] * 12, max_tokens=100, logprobs=num_top).json()["choices"][0]["logprobs"]
    events = server.stream("/v1/completions", prompt=[5] * 12, max_tokens=100, logprobs=num_top)
    for key in lists:
        assert [x for e in events for c in e["choices"] for x in c["logprobs"][key]] == lists[key]


@pytest.mark.parametrize("is_text", [True, False])
def test_echo_covers_prompt_and_answer(server: LaunchedServer, is_text: bool) -> None:
    prompt = "Hi 4" if is_text else server.http.post("/tokenize", json={"prompt": "Hi 4"}).json()["tokens"]
    answer = server.complete(prompt, max_tokens=3, logprobs=0, echo=True).json()
    choice = answer["choices"][0]
    num_tokens = answer["usage"]["total_tokens"]
    assert choice["text"].startswith("Hi 4") and "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert len(choice["logprobs"]["tokens"]) == num_tokens
    assert (
        choice["logprobs"]["token_logprobs"][0] is None
        and None not in choice["logprobs"]["token_logprobs"][1:]
    )
    events = server.stream("/v1/completions", prompt=prompt, max_tokens=3, logprobs=0, echo=True)
    assert text_of(events) == choice["text"]
    assert [t for e in events for c in e["choices"] for t in c["logprobs"]["tokens"]] == choice["logprobs"][
        "tokens"
    ]


def test_prompt_alone_is_scored_with_max_tokens_zero(server: LaunchedServer) -> None:
    answer = server.complete("Hi 4", max_tokens=0, echo=True, logprobs=1).json()
    assert answer["choices"][0]["text"] == "Hi 4" and answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3
    assert answer["usage"]["completion_tokens"] == 0
    events = server.stream(
        "/v1/completions", prompt="Hi 4", max_tokens=0, stream_options={"include_usage": True}
    )
    assert text_of(events) == "" and events[-1]["usage"]["completion_tokens"] == 0


def test_best_of_gives_n_of_them(server: LaunchedServer) -> None:
    answer = server.complete("Hi", max_tokens=4, n=2, best_of=3).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 12
    assert server.complete("Hi", n=3, best_of=2).status_code == 400
    assert server.complete("Hi", best_of=2, stream=True).status_code == 400


def test_beams_are_answers_of_their_own(server: LaunchedServer) -> None:
    beams = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5, "early_stopping": "never"}
    for answer in (server.complete("Hi", max_tokens=4, **beams), server.chat("Hi", max_tokens=4, **beams)):
        assert answer.status_code == 200, answer.text
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
    assert server.complete("Hi", use_beam_search=True, temperature=0.5).status_code == 400
    assert server.complete("Hi", use_beam_search=True, stop=["x"]).status_code == 400
    for more, param in (({"use_beam_search": True}, "use_beam_search"), ({"best_of": 2}, "best_of")):
        refused = server.complete("Hi", stream=True, **more)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "leave stream out" in refused.json()["error"]["message"]


def test_token_ids_of_vllm(server: LaunchedServer) -> None:
    choice = server.complete([5] * 12, max_tokens=2, return_token_ids=True).json()["choices"][0]
    assert choice["token_ids"] == [33, 28] and choice["prompt_token_ids"] == [5] * 12
    events = server.stream("/v1/completions", prompt=[5] * 12, max_tokens=2, return_token_ids=True)
    choices = [c for e in events for c in e["choices"]]
    assert choices[0]["prompt_token_ids"] == [5] * 12
    assert [t for c in choices for t in c["token_ids"]] == [33, 28]
    named = server.complete([5] * 12, max_tokens=1, logprobs=0, return_tokens_as_token_ids=True).json()
    assert named["choices"][0]["logprobs"]["tokens"] == ["token_id:33"]


def test_prompt_logprobs_of_vllm(server: LaunchedServer) -> None:
    choice = server.complete([33, 28, 216], max_tokens=1, prompt_logprobs=0).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {"28": {"logprob": -1.0, "rank": 1, "decoded_token": ","}}


def test_stop_token_ids(server: LaunchedServer) -> None:
    choice = server.complete([5] * 12, max_tokens=9, stop_token_ids=[34]).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == 34 and choice["text"] == "1, "


def test_request_id_is_used(server: LaunchedServer) -> None:
    assert server.complete("Hi", request_id="mine").json()["id"] == "cmpl-mine"


def test_events_are_lines_of_strict_json(server: LaunchedServer) -> None:
    with server.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = answer.read()
    blocks = data.split(b"\n\n")
    assert blocks[-1] == b"" and blocks[-2] == b"data: [DONE]"
    for block in blocks[:-2]:
        assert block.startswith(b"data: ") and b"\n" not in block
        json.loads(block[6:])
