"""``headrace bench``: run workloads of token ids, offline or against a server, and report speed and latencies."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.bench_device import DeviceReport, device_table
from headrace.cli.bench_online import Server, run_online
from headrace.cli.bench_report import report, table
from headrace.cli.builtin_workloads import sizes_text, temperature_of
from headrace.cli.engine_options import EngineSettings, engine_options
from headrace.cli.workload import WorkloadRequest, find_workloads
from headrace.cli.workload_limits import WorkloadLimits, size_text
from headrace.errors import ConfigError, RequestError
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM

_WARM_UP = [WorkloadRequest(prompt_ids=list(range(8)), output_len=4)]

Run = Callable[[list[WorkloadRequest], float, str], dict[str, Any]]
"""(requests, temperature, a salt that keeps prefixes apart from those of other runs) -> figures."""


@engine_options
def bench(
    settings: EngineSettings,
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help="a file {name: [{prompt_ids, output_len}, …]}, or names with commas of these "
            f"(requests/tokens in/tokens out): {sizes_text()}",
        ),
    ],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="run this workload of the file; repeatable")
    ] = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="runs of each; the median by time counts")
    ] = 1,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy; by default the workload's own")
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", "--url", help="run against the server there, over HTTP, streaming"),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="with --base-url: the server's key, if it has one")
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option("--request-rate", min=1e-6, help="with --base-url: requests a second; else all at once"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of a table")] = False,
) -> None:
    """Run workloads: answers have the length that the workload says. Each run starts with no prefix of earlier runs.

    Offline all requests arrive at once, and figures of the device are reported beside those of the requests.
    """
    result: dict[str, Any]
    if base_url is not None:
        _refuse_engine_options(settings)
        server = Server(base_url, api_key)
        wanted = settings.config.model.model if "model" in settings.origins else None
        model = asyncio.run(server.model(wanted))
        workloads = find_workloads(workload, only, settings.config, is_remote=True)
        WorkloadLimits(model.max_model_len).check(workloads)

        def over_http(requests: list[WorkloadRequest], heat: float, salt: str) -> dict[str, Any]:
            return report(*asyncio.run(run_online(server, requests, heat, salt, request_rate, model.name)))

        result = {"base_url": base_url, "workloads": run_all(over_http, workloads, repeat, temperature)}
    else:
        _refuse_server_options(request_rate, api_key)
        workloads = find_workloads(workload, only, settings.config)
        WorkloadLimits.of(settings.config).check(workloads)
        result = run_offline(settings, workloads, repeat, temperature)
    if as_json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
        return
    sys.stdout.write(_head(result) + table(result["workloads"]))
    if base_url is None:
        sys.stdout.write(device_table(result["workloads"]))


def _refuse_engine_options(settings: EngineSettings) -> None:
    """The server's engine has its own settings. Raises ConfigError for those given here."""
    given = [f"{origin}" for name, origin in settings.origins.items() if name != "model"]
    if settings.path is not None:
        given.insert(0, "--config")
    if given:
        raise ConfigError(
            f"{given[0]} sets up an engine, and with --base-url there is none here: give it to the server instead"
        )


def _refuse_server_options(request_rate: float | None, api_key: str | None) -> None:
    """Raises ConfigError for what only a server needs."""
    for flag, value in (("--request-rate", request_rate), ("--api-key", api_key)):
        if value is not None:
            raise ConfigError(f"{flag} needs --base-url: without a server there is nothing that it is for")


def run_offline(
    settings: EngineSettings,
    workloads: dict[str, list[WorkloadRequest]],
    repeat: int,
    temperature: float | None,
) -> dict[str, Any]:
    """Load the model and run the workloads in this process."""
    from headrace.engine.llm import LLM

    start = time.perf_counter()
    with LLM.from_config(settings.config) as llm:
        load_s = time.perf_counter() - start
        run_once(llm, _WARM_UP, 0.0, "warm-up")
        device = DeviceReport(settings.config)

        def in_process(requests: list[WorkloadRequest], heat: float, salt: str) -> dict[str, Any]:
            return run_once(llm, requests, heat, salt, device)

        results = run_all(in_process, workloads, repeat, temperature)
    limits = {"bytes_per_s": device.limits.bytes_per_s, "flops_per_s": device.limits.flops_per_s}
    return {"load_s": load_s, "device": device.name, "limits": limits, "workloads": results}


def run_all(
    run: Run, workloads: dict[str, list[WorkloadRequest]], repeat: int, temperature: float | None
) -> dict[str, dict[str, Any]]:
    """Each workload so many times; the figures of the run of median time, and the times of all.

    Its size goes to stderr first, also without a terminal: a run may take long.
    """
    results = {}
    for name, requests in workloads.items():
        times = f", {repeat} times" if repeat > 1 else ""
        sys.stderr.write(f"{name}: {size_text(requests)}{times}\n")
        heat = temperature_of(name) if temperature is None else temperature
        salt = f"{time.time_ns()}-{name}"
        runs = sorted(
            (run(requests, heat, f"{salt}-{i}") for i in range(repeat)), key=lambda figures: figures["wall_s"]
        )
        results[name] = {**runs[len(runs) // 2], "all_wall_s": [figures["wall_s"] for figures in runs]}
    return results


def run_once(
    llm: LLM,
    requests: list[WorkloadRequest],
    temperature: float,
    salt: str,
    device: DeviceReport | None = None,
) -> dict[str, Any]:
    """One timed run.

    Raises: RequestError if any answer fails: a figure without all its tokens would not be true.
    """
    prompts = [{"prompt_token_ids": request.prompt_ids, "cache_salt": salt} for request in requests]
    params = [
        SamplingParams(temperature=temperature, max_tokens=request.output_len, ignore_eos=True, seed=index)
        for index, request in enumerate(requests)
    ]
    with llm.measure_steps() as meter:
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for request, output in zip(requests, outputs, strict=True):
        answer = output.outputs[0]
        if len(answer.token_ids) != request.output_len:
            why = answer.error or f"finish_reason {answer.finish_reason}"
            raise RequestError(
                f"request {output.request_id} gave {len(answer.token_ids)} of {request.output_len} tokens: {why}"
            )
    return report(outputs, meter.wall_s) | ({} if device is None else device.figures(meter))


def _head(result: dict[str, Any]) -> str:
    if "base_url" in result:
        return f"{result['base_url']}\n"
    limits = result["limits"]
    return (
        f"loaded in {result['load_s']:.1f} s on {result['device']}: copies {limits['bytes_per_s'] / 1e9:.0f} GB/s, "
        f"products {limits['flops_per_s'] / 1e12:.2f} TFLOP/s at most\n"
    )
