"""Start and end of a server, and what clients see of it."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.serve.launch import LaunchedServer, is_running, kill
from tests.serve.null_server import TOKENS

Launch = Callable[..., LaunchedServer]
PACED = {"tokens": TOKENS, "step_s": 0.005}
SLOW_LOAD = "tests.serve.odd_cores:loads_slowly"


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(work()))
    thread.start()
    return thread, out


def test_port_answers_while_the_engine_loads_and_requests_wait(launch: Launch) -> None:
    server = launch(factory=SLOW_LOAD, core={"load_s": 2.0})
    start = time.monotonic()
    answer = server.wait_health(503)
    assert time.monotonic() - start < 2
    assert answer.json()["status"] == "loading"
    assert server.http.get("/health/live").status_code == 200
    assert server.http.get("/health/ready").status_code == 503
    assert server.metric("engine_up") == 0
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 8192
    early = server.complete("Hi", max_tokens=3)
    assert early.status_code == 200 and early.json()["usage"]["completion_tokens"] == 3
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.metric("engine_up") == 1


def test_the_longest_request_is_what_memory_holds(launch: Launch) -> None:
    server = launch(factory="tests.serve.odd_cores:masked", core={"num_blocks": 128}).wait_ready()
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["max_model_len"] == 2048 == server.http.get("/v1/models/smollm2").json()["max_model_len"]
    tokens = server.http.post("/tokenize", json={"prompt": "Hi"}).json()
    assert tokens["max_model_len"] == 2048 and tokens["count"] == 1
    refused = server.complete([1] * 2048, max_tokens=1)
    assert refused.status_code == 400 and "holds 2048 tokens" in refused.text
    assert server.complete([1] * 2047, max_tokens=1).status_code == 200


def test_waiting_for_the_engine_has_a_limit(launch: Launch) -> None:
    server = launch(factory=SLOW_LOAD, core={"load_s": 20.0}, server={"load_wait_s": 0.3})
    server.wait_health(503)
    answer = server.complete("Hi")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
    assert int(answer.headers["retry-after"]) > 0
    assert server.stop() == 0


def test_client_that_leaves_while_the_engine_loads_is_forgotten(launch: Launch) -> None:
    server = launch(factory=SLOW_LOAD, core={"load_s": 1.5})
    server.wait_health(503)
    server.open_raw("/v1/completions", {"prompt": "Hi", "max_tokens": 8000}).close()
    server.wait_ready()
    server.wait_metric("num_requests_running", 0, 2)
    assert server.metric("prompt_tokens_total") == 0


def test_model_that_cannot_be_loaded_ends_the_server(launch: Launch) -> None:
    server = launch(factory="tests.engine.faulty_core:cannot_load", core={})
    assert server.process.wait(15) != 0
    assert "cut after 12 bytes" in server.output()


def test_model_that_does_not_exist_ends_the_server(launch: Launch) -> None:
    server = launch(engine={"model": "/no/such/model.gguf"})
    assert server.process.wait(15) != 0
    assert "/no/such/model.gguf" in server.output()


def test_sigterm_drains(launch: Launch) -> None:
    server = launch(core=PACED).wait_ready()
    pid = server.engine_pid()
    thread, out = in_background(
        lambda: server.stream(
            "/v1/completions", prompt="Hi", max_tokens=200, stream_options={"include_usage": True}
        )
    )
    server.wait_metric("num_requests_running", 1)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.TransportError):
        httpx.post(server.base + "/v1/completions", json={"prompt": "Hi"}, trust_env=False)
    thread.join(20)
    assert out[0][-1]["usage"]["completion_tokens"] == 200
    assert server.process.wait(10) == 0
    assert not is_running(pid)


def test_drain_has_a_limit(launch: Launch) -> None:
    server = launch(core=PACED, server={"drain_s": 1}).wait_ready()
    plain, streamed = (
        in_background(lambda is_stream=is_stream: server.complete("Hi", max_tokens=8000, stream=is_stream))
        for is_stream in (False, True)
    )
    slow = server.open_raw("/v1/completions", {"prompt": "Hi", "max_tokens": 8000, "stream": True})
    server.wait_metric("num_requests_running", 3)
    start = time.monotonic()
    assert server.stop() == 0
    assert 0.8 < time.monotonic() - start < 6
    for thread, _ in (plain, streamed):
        thread.join(5)
    assert plain[1][0].status_code == 503 and "has ended" in plain[1][0].json()["error"]["message"]
    last = streamed[1][0].text.strip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["type"] == "service_unavailable_error"
    assert "Traceback" not in server.output(), server.output()
    slow.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_does_not_wait(launch: Launch, number: signal.Signals) -> None:
    server = launch(core=PACED).wait_ready()
    raw = server.open_raw("/v1/completions", {"prompt": "Hi", "max_tokens": 8000})
    server.wait_metric("num_requests_running", 1)
    server.process.send_signal(number)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.process.send_signal(number)
    assert server.process.wait(5) == 0
    assert "Traceback" not in server.output(), server.output()
    raw.close()


def test_sigterm_while_loading_ends_at_once(launch: Launch) -> None:
    server = launch(factory=SLOW_LOAD, core={"load_s": 60.0})
    server.wait_health(503)
    pid = server.engine_pid()
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < 8
    assert not is_running(pid)


def test_killed_engine_fails_its_requests_and_health_tells(launch: Launch) -> None:
    server = launch(core=PACED).wait_ready()
    plain = in_background(lambda: server.complete("Hi", max_tokens=8000))
    streamed = server.open_raw("/v1/completions", {"prompt": "Hi", "max_tokens": 8000, "stream": True})
    server.wait_metric("num_requests_running", 2)
    kill(server.engine_pid())
    plain[0].join(10)
    assert plain[1][0].status_code == 503 and plain[1][0].json()["error"]["code"] == "engine_dead"
    streamed.settimeout(10)
    data = b""
    while piece := streamed.recv(65536):
        data += piece
        if data.endswith(b"0\r\n\r\n"):
            break
    assert b'"error":' in data and b"SIGKILL" in data and b"[DONE]" not in data
    assert server.wait_health(503).json()["status"] == "dead"
    assert server.http.get("/health/live").status_code == 503
    late = server.complete("Hi")
    assert late.status_code == 503 and "SIGKILL" in late.json()["error"]["message"]
    assert server.metric("num_requests_running") == 0
    streamed.close()
    told = [line for line in server.output().splitlines() if "start the server again" in line]
    assert len(told) == 1 and "SIGKILL" in told[0]
    assert server.stop() == 0


def test_killed_server_leaves_no_engine_behind(launch: Launch) -> None:
    server = launch(core=PACED).wait_ready()
    pid = server.engine_pid()
    raw = server.open_raw("/v1/completions", {"prompt": "Hi", "max_tokens": 8000})
    server.wait_metric("num_requests_running", 1)
    kill(server.process.pid)
    server.process.wait()
    end = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < end
        time.sleep(0.02)
    raw.close()


def test_failing_step_is_told_with_its_cause(launch: Launch) -> None:
    server = launch(factory="tests.engine.faulty_core:crashes", core={"steps": 3}).wait_ready()
    answer = server.complete("Hi", max_tokens=100)
    assert answer.status_code == 503 and "a step failed" in answer.json()["error"]["message"]


def test_failure_of_one_request_is_its_own(launch: Launch) -> None:
    server = launch(factory="tests.serve.odd_cores:fails_one", core={"prompt_length": 3}).wait_ready()
    answer = server.complete([5, 5, 5], max_tokens=20)
    assert answer.status_code == 500 and "logits" in answer.json()["error"]["message"]
    assert server.complete([5, 5, 5], max_tokens=20, stream=True).status_code == 500
    assert server.complete([5, 5], max_tokens=20).status_code == 200
    server.wait_metric("num_requests_running", 0)


def test_full_queue_is_429_for_streams_too(launch: Launch) -> None:
    server = launch(core=PACED, engine={"max_num_seqs": 1, "max_waiting_requests": 1}).wait_ready()
    held = []
    for name in ("running", "waiting"):  # one not yet taken up would fill the queue for the other
        held.append(server.open_raw("/v1/completions", {"prompt": "Hi", "max_tokens": 8000}))
        server.wait_metric(f"num_requests_{name}", 1)
    for stream in (False, True):
        answer = server.complete("Hi", stream=stream)
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1"
    assert refusals(server, "queue_full") == 2
    assert server.complete(["a", "b"]).status_code == 429
    assert refusals(server, "queue_full") == 3
    assert server.complete(["a", "b", "c"]).status_code == 400  # would never fit
    for raw in held:
        raw.close()
    server.wait_metric("num_requests_running", 0)


def refusals(server: LaunchedServer, code: str) -> float:
    """Requests that /metrics says were refused with a code."""
    found = re.findall(
        rf'^vllm:request_refused_total{{.*code="{code}".*}} (\S+)$', server.http.get("/metrics").text, re.M
    )
    return sum(map(float, found))


def test_refused_requests_are_counted_whoever_refuses_them(launch: Launch) -> None:
    server = launch(factory="tests.serve.odd_cores:refuses_late", core={}).wait_ready()
    assert refusals(server, "invalid_value") == 0 and server.metric("request_refused_total") == 0
    assert server.http.post("/v1/completions", content=b"{").status_code == 400
    assert server.complete("Hi", prompts=1).status_code == 400
    assert server.complete("Hi", temperature=-1).status_code == 400
    assert server.complete([5] * 9000).status_code == 400
    assert server.chat("Hi", model="another").status_code == 404
    assert server.http.post("/tokenize", json={}).status_code == 400  # asks for no answer
    codes = (
        "invalid_json",
        "unknown_field",
        "invalid_request_error",
        "context_length_exceeded",
        "model_not_found",
    )
    assert [refusals(server, code) for code in codes] == [1] * 5
    assert server.complete("Hi", max_tokens=20).status_code == 400  # by the core, in a step
    assert refusals(server, "no_token_allowed") == 1
    answer = server.complete("Hi", max_tokens=20, stream=True)  # when the stream has begun
    assert answer.status_code == 200 and "no token is allowed here" in answer.text
    assert refusals(server, "no_token_allowed") == 2
    assert server.metric("request_refused_total") == 7 and server.metric("request_success_total") == 0


def test_second_server_on_a_port_is_told_so(launch: Launch) -> None:
    first = launch().wait_ready()
    second = launch(server={"port": first.port})
    assert second.process.wait(10) != 0
    assert f"port {first.port}" in second.output() and "in use" in second.output()
    assert first.complete("Hi", max_tokens=1).status_code == 200


def test_api_key(launch: Launch) -> None:
    server = launch(server={"api_key": "s\u00e9same"}).wait_ready()
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic c2U="},
        {"authorization": "Bearer"},
    ):
        answer = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert server.http.get("/v1/models", headers=headers).status_code == 401
    good = {"authorization": "Bearer s\u00e9same".encode()}
    assert server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=good).status_code == 200
    assert server.http.get("/metrics").status_code == 200


def test_cors_only_where_allowed(launch: Launch) -> None:
    server = launch(server={"cors_origins": "https://a.example, https://b.example"}).wait_ready()
    asked = {"origin": "https://b.example", "access-control-request-method": "POST"}
    answer = server.http.request("OPTIONS", "/v1/chat/completions", headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://b.example"
    foreign = server.http.request(
        "OPTIONS", "/v1/completions", headers=asked | {"origin": "https://c.example"}
    )
    assert foreign.status_code == 400
    body = {"prompt": "Hi", "stream": True, "max_tokens": 2}
    streamed = server.http.post("/v1/completions", json=body, headers={"origin": "https://a.example"})
    assert streamed.headers["access-control-allow-origin"] == "https://a.example"
    assert streamed.text.endswith("[DONE]\n\n")


def test_no_torch_in_the_server(launch: Launch) -> None:
    server = launch().wait_ready()
    server.complete("Hi", max_tokens=1)
    maps = open(f"/proc/{server.process.pid}/maps").read()  # noqa: SIM115
    assert "torch" not in maps
