"""From process start to an answering port and to the first token, and what the processes weigh.

python benchmarks/serving/bench_startup.py [MODEL] [--repeat 1] [--limit-s 60]

Importing torch alone is measured first, which also brings its files into the page cache, as the model's are read once
before. Then ``headrace serve`` is started, and asked for one token as soon as its port answers. Each figure is printed
as it is known. Memory is PSS of all processes, so pages that they share count once, in MB of 10^6 bytes. It may be 450
MB, 1.1 times the weights' files, and the KV that requests have filled (of one short prompt: counted as nothing).
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrace.checkpoint import resolve_model

COMMAND = [sys.executable, "-c", "from headrace.cli.main import main; main()"]
TORCH = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
LOOK_S = 0.01
WEIGHT_FILES = (".gguf", ".safetensors")
FIXED_MB = 450


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, method: str, path: str, timeout_s: float, body: bytes = b"") -> bytes | None:
    """The answer's first bytes, None if nobody listens. Raw, so that no client library's cost is counted."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as raw:
            raw.sendall(
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            return raw.recv(65536)
    except ConnectionError:
        return None


def processes(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in processes(int(child)))]


def pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024 / 1e6


def model_files(model: str) -> list[Path]:
    path = resolve_model(model).path
    return [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]


def allowed_mb(model: str) -> float:
    weights = sum(file.stat().st_size for file in model_files(model) if file.suffix in WEIGHT_FILES)
    return 1.1 * weights / 1e6 + FIXED_MB


def read_files(model: str) -> None:
    """Bring the model's files into the page cache."""
    for file in model_files(model):
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def run_once(model: str, limit_s: float, torch_s: float) -> dict[str, float]:
    """Start a server, measure and end it. Ends the benchmark if the server ends or takes too long."""
    port, log = free_port(), tempfile.TemporaryFile()  # noqa: SIM115 - the server writes to it
    start = time.perf_counter()
    server = subprocess.Popen([*COMMAND, "serve", model, "--port", str(port)], stderr=log)
    try:
        while ask(port, "GET", "/health", limit_s) is None:
            if server.poll() is not None or time.perf_counter() - start > limit_s:
                log.seek(0)
                raise SystemExit(f"the port did not answer: {log.read().decode()}")
            time.sleep(LOOK_S)
        answers = time.perf_counter() - start
        say(f"port answers after {answers:.2f} s")
        body = json.dumps({"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}).encode()
        first = ask(port, "POST", "/v1/completions", limit_s, body)
        token = time.perf_counter() - start
        if first is None or b" 200 " not in first:
            raise SystemExit(f"no token came: {first!r}")
        say(
            f"first token after {token:.2f} s, of which {torch_s / token:.0%} is torch's import alone ({torch_s:.2f} s)"
        )
        sizes = [pss_mb(pid) for pid in processes(server.pid)]
        say(
            f"PSS {sum(sizes):.0f} MB: {' + '.join(f'{size:.0f}' for size in sizes)} (API process, then its children); "
            f"1.1 x weights + {FIXED_MB} MB is {allowed_mb(model):.0f} MB: "
            f"{'holds' if sum(sizes) <= allowed_mb(model) else 'MISSED'}"
        )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return {"port answers, s": answers, "first token, s": token, "PSS, MB": sum(sizes)}


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=60.0, help="a server that takes longer has failed")
    args = parser.parse_args()
    read_files(args.model)
    imports = [
        float(
            subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(2)
    ]
    say(f"importing torch takes {min(imports):.2f} s")
    runs = [run_once(args.model, args.limit_s, min(imports)) for _ in range(args.repeat)]
    if args.repeat > 1:
        for name in runs[0]:
            values = sorted(run[name] for run in runs)
            say(f"{name}: median {statistics.median(values):.2f} (from {values[0]:.2f} to {values[-1]:.2f})")


if __name__ == "__main__":
    main()
