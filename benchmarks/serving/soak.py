"""A soak: minutes of mixed load with cancels through the engine core; fails when blocks are left or memory grows.

    python benchmarks/serving/soak.py MODEL [--minutes 5] [--rate 20] [--streams 64] [-o KEY=VALUE ...]

MODEL is a folder or the name of a shape in benchmarks/data/models. Requests of all kinds (greedy, drawn, filtered, with
penalties and log-probabilities, several answers, shared beginnings, long prompts) come at random times; a third is
cancelled, most of them while they run. Every tenth of the time a line says what is held. At the end nothing may run, no
block may be held or fenced, the ledger must be sound, and memory may not have grown since the first third: the device's
by 1 %, the host's by 2 % and 32 MiB.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "offline"))
from bench_offline import make_core, parse_options, vocab_size

from headrace.core.output import EngineCoreRequest
from headrace.engine.engine_core import EngineCore
from headrace.platforms.base import current_platform
from headrace.platforms.host_limits import HostLimits
from headrace.sampling_params import SamplingParams

DEVICE_GROWTH, HOST_GROWTH, HOST_SLACK_BYTES = 0.01, 0.02, 32 << 20
CANCELLED_SHARE = 1 / 3

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "n": 3},
]


class Load:
    """Random requests, and when they are cancelled."""

    def __init__(self, seed: int, num_ids: int, longest: int) -> None:
        self._rng = random.Random(seed)
        self._num_ids = num_ids
        self._longest = longest
        self._heads = [self._ids(self._rng.randint(16, longest // 4)) for _ in range(8)]
        self.num_made = 0

    def next_gap_s(self, rate: float) -> float:
        """Until the next request."""
        return self._rng.expovariate(rate)

    def request(self) -> EngineCoreRequest:
        """One of any kind."""
        rng, self.num_made = self._rng, self.num_made + 1
        prompt = list(rng.choice(self._heads)) if rng.random() < 0.5 else []
        most = self._longest // (2 if rng.random() < 0.1 else 8)
        prompt += self._ids(rng.randint(1, max(most - len(prompt), 1)))
        length = rng.randint(1, max(min(256, self._longest - len(prompt) - 1), 1))
        params = SamplingParams(
            max_tokens=length, ignore_eos=True, seed=rng.getrandbits(31), **rng.choice(KINDS)
        )
        return EngineCoreRequest(f"s{self.num_made}", prompt, params, length)

    def cancelled_after_s(self, stay_s: float) -> float | None:
        """When a client goes away; None: it stays."""
        return self._rng.uniform(0.0, stay_s) if self._rng.random() < CANCELLED_SHARE else None

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(3, self._num_ids) for _ in range(count)]


class Soak:
    """Drives the core; what it saw is in the attributes."""

    def __init__(self, core: EngineCore, load: Load, device: str) -> None:
        self._core = core
        self._load = load
        self._platform = current_platform(device)  # type: ignore[arg-type]
        self.device_bytes: list[int] = []
        self.host_bytes: list[int] = []
        self.num_tokens = self.num_cancelled = self.num_finished = self.num_failed = 0

    def run(self, seconds: float, rate: float, most: int) -> None:
        """So long, then until all is answered."""
        start = time.monotonic()
        next_request = next_line = start
        cancels: dict[str, float] = {}
        while (now := time.monotonic()) < start + seconds or self._core.has_work():
            running = self._core.stats().num_running + self._core.stats().num_waiting
            if now < start + seconds and now >= next_request and running < most:
                request = self._load.request()
                self._core.add_request(request)
                next_request = max(next_request, now - 1.0) + self._load.next_gap_s(rate)
                stay_s = self._load.cancelled_after_s(3.0)
                if stay_s is not None:
                    cancels[request.request_id] = now + stay_s
            gone = [name for name, due in cancels.items() if due <= now]
            self._core.abort_requests(gone)
            for name in gone:
                del cancels[name]
            self._step()
            if now >= next_line:
                next_line += seconds / 10
                self._line(now - start)
        self._line(time.monotonic() - start)

    def _step(self) -> None:
        if not self._core.has_work():
            time.sleep(1e-3)
        for item in self._core.step():
            self.num_tokens += len(item.new_token_ids)
            if item.finish_reason is not None:
                reason = item.finish_reason
                self.num_cancelled += reason == "abort"
                self.num_failed += reason == "error"
                self.num_finished += reason not in ("abort", "error")

    def _line(self, seconds: float) -> None:
        gc.collect()
        stats = self._core.stats()
        self.device_bytes.append(self._platform.used_memory_bytes())
        self.host_bytes.append(HostLimits().process_memory_bytes())
        print(
            f"{seconds:6.0f} s: {stats.num_running} running, {stats.num_waiting} waiting, blocks held "
            f"{stats.num_held_blocks}, cached {stats.num_cached_blocks}, fenced {stats.num_fenced_blocks}; device "
            f"{self.device_bytes[-1] / 2**20:.0f} MiB, host {self.host_bytes[-1] / 2**20:.0f} MiB; "
            f"{self.num_tokens} tokens, {self.num_finished} finished, {self.num_cancelled} cancelled, "
            f"{self.num_failed} failed, {stats.num_preemptions} preemptions",
            flush=True,
        )

    def faults(self) -> list[str]:
        """What a soak must not leave."""
        stats, found = self._core.stats(), []
        held = (stats.num_running, stats.num_waiting, stats.num_held_blocks, stats.num_fenced_blocks)
        if any(held):
            found.append(f"left at the end: running, waiting, held blocks, fenced blocks {held}")
        if self.num_failed or not self.num_finished or not self.num_cancelled:
            found.append(
                f"{self.num_failed} failed, {self.num_finished} finished, {self.num_cancelled} cancelled"
            )
        self._core.scheduler.check_integrity()
        third = len(self.device_bytes) // 3
        device, host = max(self.device_bytes[: third + 1]), max(self.host_bytes[: third + 1])
        if self._platform.name != "cpu" and self.device_bytes[-1] > device * (1 + DEVICE_GROWTH):
            found.append(f"device memory grew from {device} to {self.device_bytes[-1]} bytes")
        if self.host_bytes[-1] > host * (1 + HOST_GROWTH) + HOST_SLACK_BYTES:
            found.append(f"host memory grew from {host} to {self.host_bytes[-1]} bytes")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--streams", type=int, default=64, help="requests at once at most")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of a request at most, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--option", action="append", default=[], help="engine option as KEY=VALUE")
    args = parser.parse_args()
    options = parse_options(args.option)
    core = make_core(args.model, options, is_offline=False)
    soak = Soak(core, Load(args.seed, vocab_size(args.model), args.longest), options.get("device", "auto"))
    soak.run(60 * args.minutes, args.rate, args.streams)
    faults = soak.faults()
    core.shutdown()
    print("\n".join(faults) or "nothing is left, nothing grew")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
