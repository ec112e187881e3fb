"""From process start to an answering port and to the first token, and what the processes weigh.

python benchmarks/serving/bench_startup.py [MODEL] [--repeat 3]

Runs ``headrace serve`` with the files in the page cache (a first run does not count). Importing torch alone is
measured beside it. Memory is PSS, so pages that processes share count once.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-c", "from headrace.cli.main import main; main()"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, method: str, path: str, body: bytes = b"") -> bytes | None:
    """The answer's first bytes, None if nobody listens. Raw, so that no client library's cost is counted."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as raw:
            raw.sendall(
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            return raw.recv(65536)
    except OSError:
        return None


def processes(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in processes(int(child)))]


def pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def run_once(model: str) -> dict[str, float]:
    port, start = free_port(), time.perf_counter()
    server = subprocess.Popen([*COMMAND, "serve", model, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        while ask(port, "GET", "/health") is None:
            time.sleep(0.005)
        answers = time.perf_counter() - start
        body = json.dumps({"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}).encode()
        first = ask(port, "POST", "/v1/completions", body)
        token = time.perf_counter() - start
        assert first is not None and b" 200 " in first, first
        sizes = [pss_mb(pid) for pid in processes(server.pid)]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return {
        "port answers s": answers,
        "first token s": token,
        "PSS API MB": sizes[0],
        "PSS all MB": sum(sizes),
    }


def torch_import_s() -> float:
    program = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    run_once(args.model)
    runs = [run_once(args.model) for _ in range(args.repeat)]
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        print(f"{name}: median {statistics.median(values):.2f} (from {values[0]:.2f} to {values[-1]:.2f})")
    print(f"of the first token, torch's import alone: {min(torch_import_s() for _ in range(3)):.2f} s")


if __name__ == "__main__":
    main()
