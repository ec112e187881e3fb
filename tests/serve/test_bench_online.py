"""``headrace bench --base-url`` against a server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.bench_online import Server, run_online
from headrace.cli.bench_report import report
from headrace.cli.main import run
from headrace.cli.workload import WorkloadRequest
from headrace.errors import EngineDeadError, RequestError
from tests.serve.launch import LaunchedServer, free_port

REQUESTS = [WorkloadRequest([5, 6, 7 + number], 3 + number) for number in range(6)]


@pytest.mark.parametrize("rate", [None, 200.0])
def test_every_token_has_its_time(server: LaunchedServer, rate: float | None) -> None:
    outputs, wall_s = asyncio.run(run_online(Server(server.base), REQUESTS, 0.0, "salt", rate))
    figures = report(outputs, wall_s)
    assert figures["num_output_tokens"] == sum(request.output_len for request in REQUESTS)
    assert 0 < figures["ttft_ms"]["p50"] <= 1e3 * wall_s
    for output in outputs:
        assert output.metrics is not None
        (times,) = output.metrics.token_times
        assert times == sorted(times) and times[0] > output.metrics.arrival_time


def test_the_command(server: LaunchedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "workload.json"
    file.write_text('{"few": [{"prompt_ids": [5, 6], "output_len": 3}]}')
    assert run(["bench", "smollm2", str(file), "--base-url", server.base, "--json"]) == 0
    few = json.loads(capsys.readouterr().out)["workloads"]["few"]
    assert few["num_output_tokens"] == 3 and "device_idle_share" not in few
    assert run(["bench", "smollm2", str(file), "--base-url", server.base]) == 0
    assert "few" in capsys.readouterr().out


def test_a_model_that_the_server_lacks(
    server: LaunchedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "workload.json"
    file.write_text('{"few": [{"prompt_ids": [5, 6], "output_len": 3}]}')
    assert run(["bench", "gemma3-270m", str(file), "--base-url", server.base]) == 2
    told = capsys.readouterr().err
    assert "does not serve 'gemma3-270m'; it has: smollm2" in told
    assert run(["bench", str(file), "--base-url", f"{server.base}/v1/"]) == 0


def test_an_answer_beyond_the_servers_context(
    server: LaunchedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    file = tmp_path / "workload.json"
    file.write_text(json.dumps({"few": [{"prompt_ids": [5, 6], "output_len": limit - 1}]}))
    assert run(["bench", str(file), "--base-url", server.base]) == 2
    told = capsys.readouterr().err
    assert (
        told.startswith("headrace: request 0 of workload 'few' needs") and f"{limit} (max_model_len)" in told
    )


def test_a_server_with_a_key(
    launch: Callable[..., LaunchedServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = launch(server={"api_key": "sesame"}).wait_ready()
    file = tmp_path / "workload.json"
    file.write_text('{"few": [{"prompt_ids": [5, 6], "output_len": 3}]}')
    bench = ["bench", "smollm2", str(file), "--base-url", server.base]
    assert run([*bench, "--api-key", "sesame", "--json"]) == 0
    refusals = []
    for command in (bench, ["cache", "--url", server.base]):
        assert run(command) == 2
        told = capsys.readouterr().err
        assert "give the server's key with --api-key" in told and "{" not in told and "\\" not in told
        refusals.append(told.partition(" answered ")[2])
    assert refusals[0] == refusals[1]
    no_scheme = server.base.removeprefix("http://")
    assert run(["cache", "--base-url", no_scheme, "--api-key", "sesame", "--json"]) == 0
    assert run(["bench", str(file), "--url", no_scheme, "--api-key", "sesame"]) == 0


def test_servers_that_count_tokens_at_the_end_alone() -> None:
    """Others than Headrace: a token may come as an event without text, and the last event is no token."""
    events = [{"choices": [{"text": text}]} for text in ("a", "b", "", "c", "")]
    events.append({"choices": [], "usage": {"completion_tokens": 4}})
    prompts: list[list[int]] = []
    with other_server(events, prompts) as base:
        requests = [WorkloadRequest([5, 6, 7, 8], 4)]
        for salt in ("first", "first", "second", "third", "fourth"):
            ((output,), _) = asyncio.run(run_online(Server(base), requests, 0.0, salt))
            assert output.metrics is not None
            (times,) = output.metrics.token_times
            assert len(times) == 4 and times == sorted(times)
    assert prompts[0] == prompts[1] and all(prompt[1:] == [6, 7, 8] for prompt in prompts)
    assert len({prompt[0] for prompt in prompts}) > 1, (
        "an earlier run's prompt would be in such a server's cache"
    )


def test_an_error_in_a_stream_is_told_by_its_message() -> None:
    with other_server([{"error": {"message": "out of room", "type": "x"}}], []) as base:
        with pytest.raises(RequestError, match="out of room") as caught:
            asyncio.run(Server(base).complete({"prompt": [5]}))
        assert "{" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "lists no models"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"data": [1]}', "lists no models"),
        (b"SSH-2.0-x\r\n", "does not answer as an HTTP server"),
        (b"", "does not answer as an HTTP server"),
    ],
)
def test_what_is_no_openai_server_is_told(
    answer: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve_one() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve_one)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert run(["bench", "single", "--url", address]) == 2
        thread.join()
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


@contextmanager
def other_server(events: list[dict[str, Any]], prompts: list[list[int]]) -> Iterator[str]:
    """An address where every completion has these events; takes down the prompts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b'{"data": [{"id": "other"}]}')

        def do_POST(self) -> None:
            prompts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"])
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self._answer("".join([*lines, "data: [DONE]\n\n"]).encode())

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_refusals(server: LaunchedServer) -> None:
    async def complete(base: str, **body: object) -> None:
        await Server(base).complete(body)

    with pytest.raises(RequestError, match="answered 4"):
        asyncio.run(complete(server.base, prompt=[5], max_tokens=-1))
    with pytest.raises(EngineDeadError, match="cannot be reached"):
        asyncio.run(complete(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(RequestError, match="address"):
        Server("localhost")
