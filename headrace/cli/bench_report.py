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

    ttft_ms counts from a request's arrival, itl_ms between tokens of one answer, those that came together taken as one.
    decode_tokens_per_s is one stream's rate: tokens after the first by the time from the first to the last.
    """
    ttft, itl, num_decoded = _latencies_ms(outputs)
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
        "decode_tokens_per_s": 1e3 * num_decoded / sum(itl) if itl else 0.0,
        "ttft_ms": spread(ttft),
        "itl_ms": spread(itl),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as aligned text, one workload a line."""
    marks = [f"p{p}" for p in PERCENTILES]
    heads = ["workload", "requests", "in tok", "out tok", "wall s", "in tok/s", "out tok/s", "stream tok/s"]
    rows = [[*heads, "TTFT ms " + "/".join(marks), "ITL ms " + "/".join(marks)]]
    for name, result in results.items():
        rows.append(
            [
                name,
                f"{result['num_requests']}",
                f"{result['num_prompt_tokens']}",
                f"{result['num_output_tokens']}",
                f"{result['wall_s']:.2f}",
                f"{result['prompt_tokens_per_s']:.0f}",
                f"{result['output_tokens_per_s']:.1f}",
                f"{result['decode_tokens_per_s']:.1f}",
                "/".join(f"{result['ttft_ms'][m]:.0f}" for m in marks if m in result["ttft_ms"]),
                "/".join(f"{result['itl_ms'][m]:.1f}" for m in marks if m in result["itl_ms"]),
            ]
        )
    return aligned(rows)


def aligned(rows: list[list[str]]) -> str:
    """Rows of cells as lines of columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(lines) + "\n"


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean and nearest-rank percentiles; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {f"p{p}": ordered[math.ceil(len(ordered) * p / 100) - 1] for p in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks}


def _latencies_ms(outputs: list[RequestOutput]) -> tuple[list[float], list[float], int]:
    """(times to first tokens, times between tokens or chunks, how many tokens came after the first ones)."""
    ttft: list[float] = []
    itl: list[float] = []
    num_decoded = 0
    for output in outputs:
        if output.metrics is None:
            continue
        for times in output.metrics.token_times:
            if times:
                ttft.append(1e3 * (times[0] - output.metrics.arrival_time))
                num_decoded += len(times) - 1
            itl += [1e3 * (after - before) for before, after in itertools.pairwise(times) if after > before]
    return ttft, itl, num_decoded
