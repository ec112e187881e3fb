"""``headrace bench``: run workload files of token ids offline and report speed and latencies."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.bench_report import PERCENTILES, report
from headrace.cli.engine_options import EngineSettings, engine_options
from headrace.cli.workload import WorkloadRequest, read_workloads
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM

_WARM_UP = [WorkloadRequest(prompt_ids=list(range(8)), output_len=4)]


@engine_options
def bench(
    settings: EngineSettings,
    workload: Annotated[
        Path, typer.Argument(metavar="WORKLOAD.json", help="{name: [{prompt_ids, output_len}, …]}")
    ],
    only: Annotated[list[str] | None, typer.Option("--only", help="run this workload; repeatable")] = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="runs of each; the median by time counts")
    ] = 1,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of a table")] = False,
) -> None:
    """Run a workload file offline: all requests arrive at once, answers have the length that the file says.

    Each run starts with no reusable prefix of earlier runs.
    """
    workloads = read_workloads(workload, only)

    from headrace.engine.llm import LLM

    start = time.perf_counter()
    with LLM.from_config(settings.config) as llm:
        load_s = time.perf_counter() - start
        run_once(llm, _WARM_UP, temperature, "warm-up")
        results = {}
        for name, requests in workloads.items():
            runs = [run_once(llm, requests, temperature, f"{name}-{i}") for i in range(repeat)]
            runs.sort(key=lambda run: run["wall_s"])
            results[name] = {**runs[len(runs) // 2], "all_wall_s": [run["wall_s"] for run in runs]}
    if as_json:
        sys.stdout.write(json.dumps({"load_s": load_s, "workloads": results}, indent=1) + "\n")
    else:
        sys.stdout.write(f"loaded in {load_s:.1f} s\n" + table(results))


def run_once(llm: LLM, requests: list[WorkloadRequest], temperature: float, salt: str) -> dict[str, Any]:
    """One timed run; ``salt`` keeps its prefixes apart from those of other runs.

    Raises: RequestError if any answer fails: a figure without all its tokens would not be true.
    """
    prompts = [{"prompt_token_ids": request.prompt_ids, "cache_salt": salt} for request in requests]
    params = [
        SamplingParams(temperature=temperature, max_tokens=request.output_len, ignore_eos=True, seed=index)
        for index, request in enumerate(requests)
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    wall_s = time.perf_counter() - start
    for request, output in zip(requests, outputs, strict=True):
        answer = output.outputs[0]
        if len(answer.token_ids) != request.output_len:
            why = answer.error or f"finish_reason {answer.finish_reason}"
            raise RequestError(
                f"request {output.request_id} gave {len(answer.token_ids)} of {request.output_len} tokens: {why}"
            )
    return report(outputs, wall_s)


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as aligned text, one workload a line."""
    marks = [f"p{p}" for p in PERCENTILES]
    heads = ["workload", "requests", "in tok", "out tok", "wall s", "out tok/s", "stream tok/s"]
    rows = [[*heads, "TTFT ms " + "/".join(marks), "ITL ms " + "/".join(marks)]]
    for name, result in results.items():
        rows.append(
            [
                name,
                f"{result['num_requests']}",
                f"{result['num_prompt_tokens']}",
                f"{result['num_output_tokens']}",
                f"{result['wall_s']:.2f}",
                f"{result['output_tokens_per_s']:.1f}",
                f"{result['decode_tokens_per_s']:.1f}",
                "/".join(f"{result['ttft_ms'][m]:.0f}" for m in marks if m in result["ttft_ms"]),
                "/".join(f"{result['itl_ms'][m]:.1f}" for m in marks if m in result["itl_ms"]),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(lines) + "\n"
