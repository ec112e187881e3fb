"""What ``headrace bench`` reports of a run: rates and latency percentiles, read from the requests' timelines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from headrace.outputs import RequestOutput

PERCENTILES = (50, 90, 99)


def report(outputs: list[RequestOutput], wall_s: float) -> dict[str, Any]:
    """Figures of one run. Times in milliseconds, rates per second of wall time.

    ttft_ms counts from a request's arrival, itl_ms between tokens of one answer.
    decode_tokens_per_s is one stream's rate: the inverse of the mean time between tokens.
    """
    ttft, itl = _latencies_ms(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "num_requests": len(outputs),
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "num_output_tokens": num_output,
        "wall_s": wall_s,
        "prompt_tokens_per_s": num_prompt / wall_s,
        "output_tokens_per_s": num_output / wall_s,
        "decode_tokens_per_s": 1e3 * len(itl) / sum(itl) if itl else 0.0,
        "ttft_ms": spread(ttft),
        "itl_ms": spread(itl),
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean and nearest-rank percentiles; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {f"p{p}": ordered[math.ceil(len(ordered) * p / 100) - 1] for p in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks}


def _latencies_ms(outputs: list[RequestOutput]) -> tuple[list[float], list[float]]:
    ttft: list[float] = []
    itl: list[float] = []
    for output in outputs:
        metrics = output.metrics or {}
        for times in metrics.get("token_times", []):
            if times:
                ttft.append(1e3 * (times[0] - metrics["arrival_time"]))
            itl += [1e3 * (after - before) for before, after in itertools.pairwise(times)]
    return ttft, itl
