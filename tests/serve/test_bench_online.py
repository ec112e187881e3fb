"""``headrace bench --base-url`` against a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.bench_online import Server, run_online
from headrace.cli.bench_report import report
from headrace.cli.main import run
from headrace.cli.workload import WorkloadRequest
from headrace.errors import EngineDeadError, RequestError
from tests.serve.launch import LaunchedServer, free_port

REQUESTS = [WorkloadRequest([5, 6, 7 + number], 3 + number) for number in range(6)]


@pytest.mark.parametrize("rate", [None, 200.0])
def test_every_token_has_its_time(server: LaunchedServer, rate: float | None) -> None:
    outputs, wall_s = asyncio.run(run_online(Server(server.base), REQUESTS, 0.0, "salt", rate))
    figures = report(outputs, wall_s)
    assert figures["num_output_tokens"] == sum(request.output_len for request in REQUESTS)
    assert 0 < figures["ttft_ms"]["p50"] <= 1e3 * wall_s
    for output in outputs:
        assert output.metrics is not None
        (times,) = output.metrics["token_times"]
        assert times == sorted(times) and times[0] > output.metrics["arrival_time"]


def test_the_command(server: LaunchedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "workload.json"
    file.write_text('{"few": [{"prompt_ids": [5, 6], "output_len": 3}]}')
    assert run(["bench", "smollm2", str(file), "--base-url", server.base, "--json"]) == 0
    few = json.loads(capsys.readouterr().out)["workloads"]["few"]
    assert few["num_output_tokens"] == 3 and "device_idle_share" not in few
    assert run(["bench", "smollm2", str(file), "--base-url", server.base]) == 0
    assert "few" in capsys.readouterr().out


def test_a_server_with_a_key(
    launch: Callable[..., LaunchedServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = launch(server={"api_key": "sesame"}).wait_ready()
    file = tmp_path / "workload.json"
    file.write_text('{"few": [{"prompt_ids": [5, 6], "output_len": 3}]}')
    bench = ["bench", "smollm2", str(file), "--base-url", server.base]
    assert run([*bench, "--api-key", "sesame", "--json"]) == 0
    assert run(bench) == 2 and "401" in capsys.readouterr().err
    assert run(["cache", "--url", server.base, "--api-key", "sesame", "--json"]) == 0
    assert run(["cache", "--url", server.base]) == 2
    told = capsys.readouterr().err
    assert "give the server's key with --api-key" in told and "{" not in told


def test_refusals(server: LaunchedServer) -> None:
    async def complete(base: str, **body: object) -> None:
        await Server(base).complete(body)

    with pytest.raises(RequestError, match="answered 4"):
        asyncio.run(complete(server.base, prompt=[5], max_tokens=-1))
    with pytest.raises(EngineDeadError, match="cannot be reached"):
        asyncio.run(complete(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(RequestError, match="address"):
        Server("localhost")
