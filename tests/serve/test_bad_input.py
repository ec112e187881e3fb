"""Mistakes of clients: the right status, an error object that names the field, and a server that lives on."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from headrace.serve.body import refuse_repeated
from tests.serve.launch import LaunchedServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def refused(answer: Any, status: int = 400, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, (answer.status_code, answer.text[:300])
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert error["param"] == param, error
    return dict(error)


def post(
    server: LaunchedServer, path: str, body: bytes, content_type: str | None = "application/json"
) -> Any:
    headers = {} if content_type is None else {"content-type": content_type}
    return server.http.post(path, content=body, headers=headers)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b'{"a": 1,, }', b"not json", b"{'a': 1}", b"\x00", b"null", b"[]", b'"x"', b"1", b"NaN",
        b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "a" "b"}',
        b'\xef\xbb\xbf{"prompt": "x"}', b'{"prompt": "x"} {}', b'{"prompt": "\x00"}', b"\x1f\x8b\x08",
        b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b', "messages": []}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
    ],
    ids=range(25),
)  # fmt: skip
def test_bodies_that_are_no_request(server: LaunchedServer, path: str, body: bytes) -> None:
    refused(post(server, path, body))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", 10**30),
        ("max_tokens", 10**7), ("max_tokens", []), ("n", 0), ("n", -1), ("n", 10**9), ("n", "2"), ("n", 1.5),
        ("temperature", -1), ("temperature", "hot"), ("temperature", 1e300), ("temperature", [1]),
        ("top_p", 0), ("top_p", 1.1), ("top_p", -0.1), ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("min_p", -1),
        ("presence_penalty", 3), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("seed", "x"),
        ("seed", 10**30), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", {"a": 1}), ("stop", 5),
        ("stop", [str(i) for i in range(100)]), ("stop_token_ids", [-1]), ("stop_token_ids", [10**9]),
        ("stop_token_ids", "x"), ("logit_bias", {"x": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"5": "a"}),
        ("logit_bias", {"99999999": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", [1]), ("min_tokens", 99),
        ("min_tokens", -1), ("allowed_token_ids", []), ("allowed_token_ids", [10**8]), ("bad_words", [""]),
        ("bad_words", "x"), ("stream", "yes"), ("stream", 1), ("prompt_logprobs", 99), ("priority", 5),
        ("priority", "high"), ("response_format", {"type": "yaml"}), ("response_format", "json"),
        ("guided_json", 5), ("guided_regex", ""), ("guided_choice", []), ("guided_grammar", {}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", "json"), ("structured_outputs", {"regex": "a", "backend": "x"}),
        ("early_stopping", True), ("length_penalty", 2), ("user_id", "x"),
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_name_their_field(server: LaunchedServer, field: str, value: Any) -> None:
    fields = {"max_tokens": 4, field: value}
    refused(server.complete("Hi", **fields), param=field)
    refused(server.chat("Hi", **fields), param=field)
    if field not in ("stream", "stream_options"):
        refused(server.complete("Hi", **fields, stream=True), param=field)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "min_p", "seed"])
def test_numbers_that_are_none(server: LaunchedServer, field: str, value: str) -> None:
    refused(post(server, COMPLETIONS, f'{{"prompt": "Hi", "max_tokens": 2, "{field}": {value}}}'.encode()))


@pytest.mark.parametrize(
    "prompt",
    [None, [], "", [""], [[]], ["Hi", ""], ["Hi", 1], [1, "Hi"], [[1], "x", 2], {}, {"text": "Hi"}, 5, True, [True],
     [1.0], [[1, 2.5]], [None], [-1], [10**9], [[1, 10**30]], [49152], [{"a": 1}], [[[1]]]],
    ids=str,
)  # fmt: skip
def test_prompts_of_no_known_form(server: LaunchedServer, prompt: Any) -> None:
    refused(server.complete(prompt, max_tokens=2), param="prompt")


@pytest.mark.parametrize(
    "messages",
    [None, [], {}, "Hi", ["Hi"], [None], [[]], [{}], [{"role": "user"}], [{"content": "Hi"}],
     [{"role": 5, "content": "Hi"}], [{"role": "", "content": "Hi"}], [{"role": "nobody", "content": "Hi"}],
     [{"role": "user", "content": 5}], [{"role": "user", "content": {}}], [{"role": "user", "content": None}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}],
     [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"text": "Hi"}]}],
     [{"role": "user", "content": [5]}], [{"role": "assistant", "tool_calls": "x"}]],
    ids=str,
)  # fmt: skip
def test_messages_of_no_known_form(server: LaunchedServer, messages: Any) -> None:
    refused(server.http.post(CHAT, json={"messages": messages, "max_tokens": 2}), param="messages")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 5}, "logprobs"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"), ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"), ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"web_search_options": {}}, "web_search_options"), ({"echo": True}, "echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
        ({"prompt": "x"}, "prompt"), ({"chat_template": "{% if %}"}, None), ({"chat_template_kwargs": []}, None),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
    ids=str,
)  # fmt: skip
def test_chat_fields(server: LaunchedServer, fields: dict[str, Any], param: str | None) -> None:
    refused(server.chat("Hi", **fields), param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": True}, "logprobs"), ({"logprobs": 21}, "logprobs"), ({"suffix": "x"}, "suffix"),
     ({"best_of": 0}, "best_of"), ({"messages": HELLO}, "messages"), ({"echo": "yes"}, "echo")],
    ids=str,
)  # fmt: skip
def test_completion_fields(server: LaunchedServer, fields: dict[str, Any], param: str) -> None:
    refused(server.complete("Hi", **fields), param=param)


@pytest.mark.parametrize(
    "fields",
    [{"user": "me"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}, {"tools": []},
     {"tool_choice": "none"}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}, {"modalities": ["text"]},
     {"response_format": {"type": "text"}}, {"logit_bias": {}}, {"stop": []}, {"stop": None}, {"n": None},
     {"temperature": None}, {"stream": None}, {"prediction": None}, {"seed": None}, {"prompt_cache_key": "k"},
     {"safety_identifier": "s"}, {"top_logprobs": None}, {"priority": 0}],
    ids=str,
)  # fmt: skip
def test_harmless_fields_are_taken(server: LaunchedServer, fields: dict[str, Any]) -> None:
    answer = server.chat("Hi", max_tokens=2, **fields)
    assert answer.status_code == 200, answer.text


def test_unknown_field_names_the_nearest(server: LaunchedServer) -> None:
    error = refused(server.complete("Hi", temprature=1), param="temprature")
    assert "'temperature'" in error["message"]


def test_unknown_model_is_named(server: LaunchedServer) -> None:
    for answer in (server.complete("Hi", model="none-7"), server.chat("Hi", model="none-7")):
        error = refused(answer, 404, "model")
        assert error["code"] == "model_not_found" and "none-7" in error["message"]
    refused(server.http.get("/v1/models/none-7"), 404)
    refused(server.http.post("/tokenize", json={"model": "none-7", "prompt": "x"}), 404)


def test_unknown_routes_and_methods(server: LaunchedServer) -> None:
    refused(server.http.get("/v1/nothing"), 404)
    refused(server.http.post("/v1/embeddings", json={}), 404)
    answer = server.http.get(COMPLETIONS)
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    refused(server.http.request("DELETE", "/v1/models"), 405)
    refused(server.http.request("OPTIONS", CHAT), 405)
    refused(server.http.post("/v1/completions/", json={"prompt": "Hi"}), 404)
    head = server.http.head("/v1/models")
    assert head.status_code == 200 and head.content == b""


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("application/json; charset=utf-8", 200), (None, 200), ("application/problem+json", 200),
     ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("multipart/form-data; boundary=x", 415),
     ("application/json; charset=latin-1", 415)],
)  # fmt: skip
def test_content_types(server: LaunchedServer, content_type: str | None, status: int) -> None:
    answer = post(server, COMPLETIONS, b'{"prompt": "Hi", "max_tokens": 1}', content_type)
    assert answer.status_code == status
    if status != 200:
        refused(answer, status)


def test_compressed_body_is_refused(server: LaunchedServer) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    refused(server.http.post(COMPLETIONS, content=b"\x1f\x8b", headers=headers), 415)


def test_too_large_bodies(server: LaunchedServer) -> None:
    body = b'{"prompt": "' + b"x" * (17 << 20) + b'"}'
    refused(post(server, COMPLETIONS, body), 413)

    def chunks() -> Any:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    answer = server.http.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    refused(answer, 413)


def test_ten_megabytes_of_text_are_refused_before_they_are_tokenized(server: LaunchedServer) -> None:
    for text in ("word " * 2_000_000, "x" * 10_000_000, "\u4f60" * 3_000_000):
        error = refused(server.complete(text, max_tokens=1), param="prompt")
        assert error["code"] == "context_length_exceeded"
        refused(server.chat(text, max_tokens=1))
    refused(server.complete([5] * 1_000_000, max_tokens=1), param="prompt")


def test_more_answers_than_the_server_can_ever_queue(server: LaunchedServer) -> None:
    error = refused(server.complete(["Hi"] * 100, n=128), param="prompt")
    assert "4352" in error["message"]
    refused(server.complete(["Hi"] * 3000), param="prompt")


def test_edges_of_the_context(server: LaunchedServer) -> None:
    assert server.complete([5] * 8191, max_tokens=1).status_code == 200
    for size, max_tokens in ((8192, 1), (8193, 1), (8191, 2), (8000, 500)):
        error = refused(server.complete([5] * size, max_tokens=max_tokens))
        assert error["code"] == "context_length_exceeded" and "8192" in error["message"]
    assert (
        server.complete([5] * 8189).json()["usage"]["completion_tokens"] == 3
    )  # the default 16 was nobody's wish
    refused(server.complete([5] * 8195, stream=True))
    refused(server.chat("word " * 8200, stream=True))


def test_refusal_does_not_echo_thousands_of_mistakes(server: LaunchedServer) -> None:
    messages = [{"role": "user", "content": 5, "pad": "y" * 40} for _ in range(3000)]
    for answer in (
        server.http.post(CHAT, json={"messages": messages}),
        server.complete("Hi", model="m" * 100_000),
        server.complete("Hi", **{"f" * 100_000: 1}),
        server.complete("Hi", stop="s" * 100_000, n=0),
        server.chat([{"role": "r" * 100_000, "content": "Hi"}]),
    ):
        assert 400 <= answer.status_code < 500 and len(answer.content) < 5000


@pytest.mark.parametrize(
    "text",
    ["\x00", "\ufeff", "\u202e", "\uffff", "\U0010ffff", "\x7f", "\x1b[31m", "a\u0301" * 50, "\ud7ff", " "],
)
def test_odd_characters_are_served(server: LaunchedServer, text: str) -> None:
    assert server.complete(text, max_tokens=1).status_code == 200
    assert server.chat(f"x{text}y", max_tokens=1).status_code == 200


def test_special_tokens_in_logit_bias(server: LaunchedServer) -> None:
    assert server.complete("Hi", max_tokens=1, logit_bias={"0": -100, "49151": 100}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [(b'{"prompt": "Hi", "max_tokens": 3, "max_tokens": 2}', "max_tokens"),
     (b'{"prompt": "Hi", "logit_bias": {"5": 100, "5": -100}}', "5"),
     (b'{"prompt": "Hi", "logit_bias": {"5": 100, "05": -100}}', "logit_bias"),
     (b'{"prompt": "Hi", "guided_json": {"properties": {"a": {}, "b": {}, "a": false}}}', "a"),
     (b'{"prompt": "Hi", "user": {"a": 1, "\\u0061": 2}}', "a"),
     (b'{"prompt": [' + b"1, " * 200 + b'1], "max_tokens": 3, "max_tokens": 2}', "max_tokens")],
)  # fmt: skip
def test_what_is_said_twice_is_refused(server: LaunchedServer, body: bytes, param: str) -> None:
    assert "twice" in refused(post(server, COMPLETIONS, body), param=param)["message"]


def test_a_name_may_stand_in_many_objects(server: LaunchedServer) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1, "user": [{"a": 1}, {"a": 2}, {"a": {"a": 1}}]}'
    assert post(server, COMPLETIONS, body).status_code == 200


def test_long_runs_of_digits_are_no_names() -> None:
    """Numbers of large bodies are left out of the search, and where that misleads it is done without."""
    digits = b"1," * 100
    refuse_repeated(b'{"' + digits + b'1": 1, "' + digits + b'2": 2, "b": [' + digits * 3 + b"1]}")
    refuse_repeated(b'{"a": "\\u1' + b"1" * 80 + b'", "b": [' + digits * 20 + b"1]}")
    ids = b'{"prompt": [' + b"12345, " * 1_000_000 + b"1]}"
    started = time.thread_time()
    refuse_repeated(ids)
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": -1}, "max_tokens must be at least 0; got -1"),
        ({"max_tokens": 10**12}, "max_tokens must be at most"),
        ({"max_tokens": 4, "min_tokens": 9}, "min_tokens must not be above max_tokens, which is 4; got 9"),
        ({"logit_bias": {"7": 1, "5": 101}}, "logit_bias[5] must be in [-100, 100]; got 101"),
        ({"best_of": 1000}, "best_of must be in [1, 128]; got 1000"),
        ({"use_beam_search": True, "guided_regex": "a"}, "guided_regex is given, but beam search"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias is given, but beam search"),
        ({"use_beam_search": True, "top_p": 0.5}, "leave top_p at 1"),
    ],
    ids=str,
)
def test_messages_say_what_is_wrong(server: LaunchedServer, fields: dict[str, Any], words: str) -> None:
    message = refused(server.complete("Hi", **fields))["message"]
    assert words in message and "(" not in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x" * 20_000]}, "stop"),
        ({"stop": ["x" * 300] * 60}, "stop"),
        ({"bad_words": [f"w{i}" for i in range(2000)]}, "bad_words"),
        ({"bad_words": ["x" * 20_000]}, "bad_words"),
        ({"cache_salt": "s" * 300}, "cache_salt"),
        ({"request_id": "s" * 300}, "request_id"),
        ({"chat_template": "{{1}}" * 50_000}, "chat_template"),
        ({"messages": [{"role": "user", "content": ""}] * 9000}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_would_cost_the_server_much_is_limited(
    server: LaunchedServer, fields: dict[str, Any], param: str
) -> None:
    refused(server.http.post(CHAT, json={"messages": HELLO, **fields}), param=param)
    if param not in ("messages", "chat_template"):
        refused(server.complete("Hi", **fields), param=param)


def test_answers_of_a_request_share_their_stop_strings(server: LaunchedServer) -> None:
    stop = [f"{number}" * 100 for number in range(64)]
    answer = server.complete("Hi", n=100, max_tokens=4, stop=stop)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 100
    assert server.complete("Hi", max_tokens=20, stop=["3"]).json()["choices"][0]["text"] == ", 2, "


def test_numbers_that_json_has_not_are_not_taken_for_surrogates(server: LaunchedServer) -> None:
    body = b'{"model": "m", "prompt": "a", "temperature": NaN}'
    assert "surrogate" not in refused(post(server, COMPLETIONS, body))["message"]


def test_lone_surrogates_and_cut_bodies_are_told_apart(server: LaunchedServer) -> None:
    for text in ("\\ud800", "a\\udbff", "\\udc00b", "\\ud83d x"):
        body = b'{"prompt": "%s"}' % text.encode()
        assert "lone surrogate" in refused(post(server, COMPLETIONS, body))["message"]
    assert "truncated" in refused(post(server, COMPLETIONS, b'{"prompt": "x'))["message"]


@pytest.mark.parametrize("tokens", [["x"], "x", None, [1.5], [-5], [10_000_000], [[1]], [True], {}])
def test_detokenize_refuses_what_is_no_token(server: LaunchedServer, tokens: Any) -> None:
    refused(server.http.post("/detokenize", json={"tokens": tokens}))


def test_tokenize_needs_one_of_two(server: LaunchedServer) -> None:
    for body in ({}, {"prompt": "x", "messages": HELLO}, {"prompt": 5}, {"prompt": ["x"]}, {"messages": []}):
        refused(server.http.post("/tokenize", json=body))


def test_a_thousand_bad_requests_and_then_a_good_one(server: LaunchedServer) -> None:
    draw = random.Random(7)
    values = [None, -1, 0, 10**20, 1.5, "x", "", [], [[]], {}, {"a": 1}, True, [None], "\ud7ff", 1e308]
    fields = ["prompt", "max_tokens", "temperature", "n", "stop", "logit_bias", "stream", "logprobs", "echo", "seed",
              "messages", "top_p", "nonsense", "best_of", "stream_options", "response_format", "model"]  # fmt: skip
    for number in range(1000):
        body: Any = {"prompt": "Hi", "max_tokens": 1}
        body |= {draw.choice(fields): draw.choice(values) for _ in range(draw.randrange(1, 4))}
        raw = json.dumps(body).encode()
        if number % 5 == 0:
            cut = draw.randrange(len(raw))
            raw = raw[:cut] + bytes([draw.randrange(256)]) + raw[cut + 1 :]
        answer = post(server, draw.choice([COMPLETIONS, CHAT]), raw)
        assert answer.status_code < 500, (raw, answer.text)
    assert server.complete("Hi", max_tokens=3).status_code == 200
    server.wait_metric("num_requests_running", 0)
