"""Clients that leave, and clients that read slowly."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.launch import LaunchedServer

LONG = {"prompt": "Hi", "max_tokens": 8000, "ignore_eos": True}
CHAT_LONG = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8000}


@pytest.fixture(scope="module")
def slow_server() -> Any:
    """A step takes 2 ms: an answer of 8,000 tokens lasts 16 s, far longer than these tests wait."""
    from tests.serve.null_server import TOKENS

    started = LaunchedServer(
        {"core": {"tokens": TOKENS, "step_s": 0.002}, "engine": {"max_num_seqs": 600}}
    ).wait_ready()
    yield started
    assert started.stop() == 0


def all_gone(server: LaunchedServer) -> None:
    server.wait_metric("num_requests_running", 0, 4)
    server.wait_metric("num_requests_waiting", 0, 4)
    assert server.complete("Hi", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", LONG | {"stream": True}),
        ("/v1/completions", LONG | {"n": 3, "stream": True}),
        ("/v1/completions", LONG | {"n": 3}),
        ("/v1/completions", LONG | {"prompt": ["a", "b", "c"]}),
        ("/v1/completions", LONG | {"prompt": ["a", "b"], "stream": True, "stop": "never comes"}),
        ("/v1/chat/completions", CHAT_LONG),
        ("/v1/chat/completions", CHAT_LONG | {"stream": True}),
    ],
    ids=str,
)
def test_leaving_frees_the_request_at_once(
    slow_server: LaunchedServer, path: str, body: dict[str, Any]
) -> None:
    raw = slow_server.open_raw(path, body)
    end = time.monotonic() + 5
    while slow_server.metric("num_requests_running") == 0:
        assert time.monotonic() < end
    raw.close()
    all_gone(slow_server)


def test_leaving_before_the_body_is_sent(slow_server: LaunchedServer) -> None:
    for _ in range(20):
        raw = socket.create_connection(("127.0.0.1", slow_server.port))
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{")
        raw.close()
    all_gone(slow_server)


def test_storm_of_five_hundred_cancelled_streams(slow_server: LaunchedServer) -> None:
    streams = [
        slow_server.open_raw("/v1/completions", LONG | {"stream": True, "prompt": f"Tale {i}"})
        for i in range(500)
    ]
    for number, raw in enumerate(streams):
        if number % 3 == 0:
            raw.recv(100)
        raw.close()
    all_gone(slow_server)


def test_a_storm_leaves_no_block_of_a_real_core_behind(launch: Callable[..., LaunchedServer]) -> None:
    options = {"factory": "tests.serve.odd_cores:masked", "core": {"step_ms": 2.0}}
    server = launch(**options, engine={"max_num_seqs": 300}).wait_ready()
    body = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    kinds: list[dict[str, Any]] = [{}, {"n": 2}, {"guided_regex": "[a-z]{3000}"}, {"stop": ["never comes"]}]
    streams = [
        server.open_raw(
            "/v1/completions", body | kinds[i % len(kinds)] | {"prompt": f"Tale {i % 50} of many"}
        )
        for i in range(500)
    ]
    for number, raw in enumerate(streams):
        if number % 20 == 0:
            raw.recv(100)
        raw.close()
    for name in ("num_requests_running", "num_requests_waiting", "num_kv_blocks_held"):
        server.wait_metric(name, 0)
    assert server.complete("Hi", max_tokens=2).status_code == 200


def test_slow_reader_gets_everything_and_holds_up_nobody(server: LaunchedServer) -> None:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    slow = server.open_raw("/v1/completions", LONG | {"stream": True})
    try:
        time.sleep(0.3)
        start = time.monotonic()
        assert server.complete("Hi", max_tokens=50).status_code == 200
        assert time.monotonic() - start < 2
        server.wait_metric("num_requests_running", 0)  # the engine does not wait for the reader either
        slow.settimeout(10)
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            piece = slow.recv(1000)
            assert piece, data[-200:]
            data += piece
            if len(data) < 100_000:
                time.sleep(0.001)
        assert data.count(b'"finish_reason":"length"') == 1
    finally:
        slow.close()
        raw.close()


def test_many_streams_at_once_lose_nothing(server: LaunchedServer) -> None:
    want = {
        size: server.complete([5] * size, max_tokens=60).json()["choices"][0]["text"] for size in range(1, 13)
    }
    got: dict[int, list[str]] = {size: [] for size in want}

    def read(size: int) -> None:
        events = server.stream("/v1/completions", prompt=[5] * size, max_tokens=60)
        got[size].append("".join(c["text"] for e in events for c in e["choices"]))

    run_all([lambda size=size: read(size) for size in want for _ in range(4)])  # type: ignore[misc]
    assert got == {size: [text] * 4 for size, text in want.items()}


def run_all(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_pipelined_and_kept_alive_requests(server: LaunchedServer) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 2}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port))) as raw:
        raw.settimeout(10)
        raw.sendall(request * 3)
        data = b""
        while data.count(b"HTTP/1.1 200") < 3 or data.count(b'"total_tokens"') < 3:
            piece = raw.recv(65536)
            assert piece, data
            data += piece
