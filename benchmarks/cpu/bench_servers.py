"""Two servers in turn: the same requests over HTTP, medians of the rounds and their ratios.

    python benchmarks/cpu/bench_servers.py MODEL WORKLOAD.json --server headrace=http://127.0.0.1:8102 \
        --server vllm=http://127.0.0.1:8101 [--rounds 5] [--only prefill]

Both servers are up already, with the same weights and on the same cores; MODEL and WORKLOAD are those of ``headrace
bench``, which is the client. Who begins changes each round. A salt keeps the prefixes of one run from being those of
another. The ratio is that of the first server's figure to the second's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CLIENT = "from headrace.cli.main import main; main()"
FIGURES = ("wall_s", "output_tokens_per_s", "decode_tokens_per_s", "ttft_ms", "itl_ms")


def turn(url: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of each workload, flat: "ttft_ms mean" and so on."""
    only = [part for name in args.only for part in ("--only", name)]
    command = [sys.executable, "-c", CLIENT, "bench", args.model, args.workload, "--base-url", url, "--json"]
    done = subprocess.run([*command, *only], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{url}: {done.stderr.strip()}")
    return {name: flat(figures) for name, figures in json.loads(done.stdout)["workloads"].items()}


def flat(figures: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in FIGURES:
        value = figures.get(name)
        if isinstance(value, dict):
            found |= {
                f"{name} {part}": value[part] for part in ("mean", "p99") if value.get(part) is not None
            }
        elif value:
            found[name] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("workload")
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", default=[])
    args = parser.parse_args()
    servers = dict(server.split("=", 1) for server in args.server)
    if len(servers) != 2:
        parser.error("give two servers, with different names")
    results: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in servers}
    for number in range(-1, args.rounds):  # the first one warms both up
        for name in sorted(servers, reverse=number % 2 == 0):
            found = turn(servers[name], args)
            if number >= 0:
                results[name].append(found)
    first, second = servers
    print(f"{'':12s}{'':22s}{first:>12s}{second:>12s}{'ratio':>8s}")
    for workload, figures in results[first][0].items():
        for figure in figures:
            one, other = (
                statistics.median(run[workload][figure] for run in results[name]) for name in (first, second)
            )
            print(f"{workload:12s}{figure:22s}{one:12.2f}{other:12.2f}{one / other:8.2f}")


if __name__ == "__main__":
    main()
