"""How many streamed tokens a second one core of the front end carries, with an engine that costs nothing.

python benchmarks/serving/bench_frontend.py [--streams 200] [--tokens 1000] [--step-ms 5] [--chat]

Starts null_server.py, opens the streams with raw sockets, and reads until all have ended. The front end's CPU time is
read from the kernel, so that the client's and the engine's share of the machine does not count. ``--step-ms`` paces
the engine: at a pace that the front end keeps up with, each token is an event of its own; at 0 the engine runs ahead
and tokens that wait for a reader are merged.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SERVER = Path(__file__).parent / "null_server.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_ready(port: int) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def open_stream(port: int, num_tokens: int, is_chat: bool) -> socket.socket:
    body: dict[str, object] = {"max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "Go."}]} if is_chat else {"prompt": "Go."}
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    stream = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    stream.sendall(head.encode() + data)
    stream.setblocking(False)
    return stream


def drain(streams: list[socket.socket]) -> int:
    """Read all streams to their ends; returns how many events came."""
    selector = selectors.DefaultSelector()
    for stream in streams:
        selector.register(stream, selectors.EVENT_READ, [b""])
    num_events, num_open = 0, len(streams)
    while num_open:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            num_events += data.count(b"data: ")
            key.data[0] = (key.data[0] + data)[-64:]
            if b"[DONE]" in key.data[0] or not data:
                selector.unregister(key.fileobj)
                num_open -= 1
    return num_events


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--chat", action="store_true")
    args = parser.parse_args()
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(SERVER.parents[2])}
    server = subprocess.Popen([sys.executable, SERVER, str(port), str(args.step_ms / 1000)], env=environment)
    try:
        wait_ready(port)
        drain([open_stream(port, 20, args.chat) for _ in range(args.streams)])
        start, start_cpu = time.perf_counter(), cpu_s(server.pid)
        num_events = drain([open_stream(port, args.tokens, args.chat) for _ in range(args.streams)])
        wall, cpu = time.perf_counter() - start, cpu_s(server.pid) - start_cpu
    finally:
        server.terminate()
        server.wait()
    num_tokens = args.streams * args.tokens
    print(
        f"{args.streams} streams x {args.tokens} tokens: {num_tokens / wall:,.0f} tokens/s; front end "
        f"{num_tokens / cpu:,.0f} tokens/s a core ({cpu / num_tokens * 1e6:.1f} us each), busy {cpu / wall:.0%}, "
        f"{num_events / num_tokens:.2f} events a token"
    )


if __name__ == "__main__":
    main()
