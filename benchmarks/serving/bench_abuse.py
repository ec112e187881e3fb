"""What a server takes: bad requests that must all be the client's mistake, and streams whose clients all leave.

python benchmarks/serving/bench_abuse.py [MODEL] [--url http://…] [--requests 1000] [--streams 500] [--seed 7]

Starts ``headrace serve MODEL`` unless a ``--url`` is given. Bad requests go to every route that takes a body, some of
them with a byte changed; then a good one must be answered. Then so many streams are opened at once and left, some of
them in the middle of their answers; afterwards no request may run and no KV block be held. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headrace.serve.cache_routes import CachePrompt
from headrace.serve.messages.protocol import CountRequest, MessagesRequest
from headrace.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from headrace.serve.responses.protocol import ResponsesRequest

COMMAND = [sys.executable, "-c", "from headrace.cli.main import main; main()"]
HELLO = [{"role": "user", "content": "Hi"}]
# Each route with a body that it would take.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages": {"model": "MODEL", "messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "MODEL", "messages": HELLO},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/cache/explain": {"prompt": "Hi"},
}
KINDS: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/cache/explain": CachePrompt,
}
VALUES: tuple[Any, ...] = (
    *(
        None,
        -1,
        0,
        10**20,
        10**400,
        1.5,
        -0.0,
        1e308,
        "x",
        "",
        "\x00",
        "\ud7ff",
        "(",
        "{% for x in x %}",
        True,
        False,
    ),
    *(
        [],
        [[]],
        [None],
        [-1],
        [10**9],
        ["x"],
        [""],
        [{}],
        HELLO,
        {},
        {"a": 1},
        {"type": "x"},
        {"type": "json_schema"},
    ),
    *({"role": "user"}, {"-1": 1}, {"5": 1e9}, {"regex": "("}, {"include_usage": 5}, [[[[[]]]]], ["s"] * 100),
)


class Server:
    """One server: requests with a time limit, each on a connection of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """(status, body). Raises OSError."""
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        try:
            connection.request(method, path, body or None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def open_stream(self, body: dict[str, Any]) -> socket.socket:
        """A stream that nobody reads yet."""
        data = json.dumps({**body, "stream": True}).encode()
        stream = socket.create_connection(self._address, timeout=60)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        stream.sendall(head.encode() + data)
        return stream

    def metric(self, name: str) -> float:
        """Sum over a metric's labels."""
        text = self.send("GET", "/metrics")[1].decode()
        return sum(map(float, re.findall(rf"^\w+:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))

    def wait_ready(self, limit_s: float = 120.0) -> str:
        """Returns the model's name."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            try:
                if self.send("GET", "/health")[0] == 200:
                    return str(json.loads(self.send("GET", "/v1/models")[1])["data"][0]["id"])
            except OSError:
                pass
            time.sleep(0.1)
        raise SystemExit("the server did not become ready")


def bad_body(draw: random.Random, path: str, model: str) -> bytes:
    body = {key: model if value == "MODEL" else value for key, value in GOOD[path].items()}
    fields = (*KINDS[path].__struct_fields__, "nonsense")
    body |= {draw.choice(fields): draw.choice(VALUES) for _ in range(draw.randrange(1, 4))}
    raw = json.dumps(body).encode()
    if draw.random() < 0.2:
        place = draw.randrange(len(raw))
        raw = raw[:place] + bytes([draw.randrange(256)]) + raw[place + 1 :]
    return raw


def bad_requests(server: Server, model: str, count: int, seed: int) -> bool:
    draw, statuses, faults = random.Random(seed), Counter[int](), []
    for _ in range(count):
        path = draw.choice(list(GOOD))
        raw = bad_body(draw, path, model)
        status, answer = server.send("POST", path, raw)
        statuses[status] += 1
        if (
            status >= 500 or b'"server_error"' in answer or b'"api_error"' in answer
        ):  # in a stream that has begun, too
            faults.append(f"{path} {raw[:300]!r}: {status} {answer[:300]!r}")
    good = server.send("POST", "/v1/completions", json.dumps({"prompt": "Hi", "max_tokens": 3}).encode())[0]
    print(f"{count} bad requests: {dict(sorted(statuses.items()))}; then a good one: {good}", flush=True)
    for fault in faults[:20]:
        print(fault)
    return not faults and good == 200


def storm(server: Server, count: int, seed: int) -> bool:
    draw = random.Random(seed)
    streams = [
        server.open_stream({"prompt": f"Tale {number}: ", "max_tokens": 2000, "ignore_eos": True})
        for number in range(count)
    ]
    for number, stream in enumerate(draw.sample(streams, count)):
        if number % 10 == 0:
            stream.recv(100)  # its answer has begun
        stream.close()
    start, names = time.monotonic(), ("num_requests_running", "num_requests_waiting", "num_kv_blocks_held")
    while any(server.metric(name) for name in names) and time.monotonic() - start < 30:
        time.sleep(0.05)
    left = {name: server.metric(name) for name in names}
    print(f"{count} streams left: after {time.monotonic() - start:.1f} s {left}", flush=True)
    good = server.send("POST", "/v1/completions", json.dumps({"prompt": "Hi", "max_tokens": 3}).encode())[0]
    return not any(left.values()) and good == 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--url")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    process = None
    parts = urlsplit(args.url or "")
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    if args.url is None:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(
            [*COMMAND, "serve", args.model, "--port", str(port)], stderr=subprocess.DEVNULL
        )
    try:
        server = Server(host, port)
        model = server.wait_ready()
        is_good = bad_requests(server, model, args.requests, args.seed)
        is_good &= storm(server, args.streams, args.seed)
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
