"""Starts servers as processes of their own and talks to them as a client would."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LaunchedServer:
    """A server process; ``options`` as ``null_server`` takes them."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        options = dict(options or {})
        self.port = free_port()
        options["server"] = {"port": self.port, **options.get("server", {})}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the object
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.null_server", json.dumps(options)], stderr=self.log, cwd=ROOT
        )
        self.base = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.base, timeout=30, trust_env=False)

    def wait_ready(self) -> LaunchedServer:
        self.wait_health(200)
        return self

    def wait_health(self, status: int, timeout_s: float = 30) -> httpx.Response:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            assert self.process.poll() is None, self.output()
            try:
                answer = self.http.get("/health")
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            if answer.status_code == status:
                return answer
            time.sleep(0.02)
        raise AssertionError(f"/health was not {status} in time: {self.output()}")

    def complete(self, prompt: Any = "Count: ", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def chat(self, content: Any = "Count.", **fields: Any) -> httpx.Response:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.http.post("/v1/chat/completions", json={"messages": messages, **fields})

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines[-1]
        return [json.loads(line) for line in lines[:-1]]

    def open_raw(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a request on a socket of its own and do not read the answer."""
        data = json.dumps(body).encode()
        raw = socket.create_connection(("127.0.0.1", self.port))
        fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        raw.sendall(f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data)
        return raw

    def metric(self, name: str) -> float:
        """Sum over the labels of one metric."""
        text = self.http.get("/metrics").text
        found = re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def wait_metric(self, name: str, value: float, timeout_s: float = 15) -> None:
        end = time.monotonic() + timeout_s
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} stays at {self.metric(name)}, not {value}"
            time.sleep(0.02)

    def engine_pid(self) -> int:
        """Process id of the engine core: the server's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (child,) = [int(pid) for pid in children if "core_proc" in Path(f"/proc/{pid}/cmdline").read_text()]
        return child

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the server did not end: {self.output()}") from None
        self.http.close()
        return self.process.returncode


def is_running(pid: int) -> bool:
    """False for zombies too: in a container nobody may reap an orphan."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
