from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.checkpoint import load_architecture, resolve_model
from headrace.cli.bench_device import ModelWork
from headrace.cli.bench_report import report, spread
from headrace.cli.builtin_workloads import BUILT_IN, SIZES, make_workload, sizes_text, temperature_of
from headrace.cli.workload import find_workloads, read_workloads
from headrace.config import EngineConfig
from headrace.engine.step_meter import StepMeter
from headrace.errors import CheckpointError, ConfigError
from headrace.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tests.cli.conftest import CommandLine

WORKLOADS = {
    "meta": {"seed": 0},
    "short": [{"id": 0, "prompt_ids": [5, 6, 7], "output_len": 4}],
    "many": [{"prompt_ids": [9] * 40 + [i], "output_len": i + 1} for i in range(6)],
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "workload.json"
    file.write_text(json.dumps(WORKLOADS))
    return str(file)


def test_json(headrace: CommandLine, fake_engine: list[EngineConfig], path: str) -> None:
    assert headrace("bench", "smollm2", path, "--json", "--repeat", "3") == 0, headrace.err
    result = json.loads(headrace.out)
    assert set(result["workloads"]) == {"short", "many"} and result["load_s"] > 0
    many = result["workloads"]["many"]
    assert (many["num_requests"], many["num_prompt_tokens"], many["num_output_tokens"]) == (6, 6 * 41, 21)
    assert len(many["all_wall_s"]) == 3 and many["wall_s"] == sorted(many["all_wall_s"])[1]
    assert many["output_tokens_per_s"] == pytest.approx(21 / many["wall_s"])
    assert many["num_steps"] >= 6 and 0 <= many["device_idle_share"] <= 1 and many["host_ms_per_step"] > 0
    assert result["limits"]["bytes_per_s"] > 1e8 and result["limits"]["flops_per_s"] > 1e8
    assert 0 < many["ttft_ms"]["p50"] <= many["ttft_ms"]["p99"] < 1e3 * many["wall_s"]


def test_runs_share_no_prefix_with_earlier_ones(
    headrace: CommandLine, fake_engine: list[EngineConfig], path: str
) -> None:
    cached = []
    for repeat in ("1", "3"):
        assert headrace("bench", "smollm2", path, "--json", "--repeat", repeat, "--only", "many") == 0
        cached.append(json.loads(headrace.out)["workloads"]["many"]["num_cached_tokens"])
    assert cached[0] == cached[1]


def test_table(headrace: CommandLine, fake_engine: list[EngineConfig], path: str) -> None:
    assert headrace("bench", "smollm2", path, "--only", "short") == 0, headrace.err
    loaded, heads, row, device_heads, device_row = headrace.out.splitlines()
    assert loaded.startswith("loaded in") and heads.startswith("workload") and row.startswith("short")
    assert "idle %" in device_heads and "host ms" in device_heads and device_row.startswith("short")
    assert "many" not in headrace.out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot read"),
        ("[]", "must look like"),
        ('{"meta": {}}', "no list"),
        ('{"a": [{"prompt_ids": [1], "output_len": 0}]}', r"a\[0\]"),
        ('{"a": [{"prompt_ids": [1], "output_len": 2}, {"prompt_ids": ["x"], "output_len": 2}]}', r"a\[1\]"),
        ('{"a": [7]}', r"a\[0\]"),
    ],
)
def test_wrong_workload_files(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "workload.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_workloads(file)


def test_unknown_workload_names_the_known(headrace: CommandLine, path: str) -> None:
    assert "short, many" in headrace.fails("bench", "smollm2", path, "--only", "long")


def test_tokens_outside_the_vocabulary(
    headrace: CommandLine, fake_engine: list[EngineConfig], tmp_path: Path
) -> None:
    file = tmp_path / "workload.json"
    file.write_text('{"a": [{"prompt_ids": [50000], "output_len": 1}]}')
    assert "request 0 of workload 'a' has token id 50000" in headrace.fails("bench", "smollm2", str(file))
    assert not fake_engine


def test_an_answer_that_the_context_cannot_hold_is_told_before_the_model_loads(
    headrace: CommandLine, fake_engine: list[EngineConfig], tmp_path: Path
) -> None:
    file = tmp_path / "workload.json"
    rows = [{"prompt_ids": [1], "output_len": 8191}, {"prompt_ids": [1], "output_len": 9000}]
    file.write_text(json.dumps({"a": rows}))
    told = headrace.fails("bench", "smollm2", str(file))
    assert "request 1 of workload 'a' needs 9001 tokens" in told and "8192 (max_model_len)" in told
    assert told.endswith("lower output_len to 8191 or less\n"), "the model was made for no more"
    told = headrace.fails("bench", "smollm2", str(file), "--max-model-len", "64")
    assert told.endswith("lower output_len to 63 or less, or raise max_model_len to 8192 or more\n")
    told = headrace.fails("bench", "smollm2", "prefix")
    assert "workload 'prefix' needs 8384 tokens" in told and told.endswith("shorten the prompt\n")
    assert not fake_engine


def test_the_size_of_a_run_is_told_first(
    headrace: CommandLine, fake_engine: list[EngineConfig], path: str
) -> None:
    assert headrace("bench", "smollm2", path, "--repeat", "2", "--json") == 0
    lines = headrace.err.splitlines()
    assert lines == [
        "short: 1 request, 3 tokens in, 4 tokens out, 2 times",
        "many: 6 requests, 246 tokens in, 21 tokens out, 2 times",
    ]


def test_a_workload_built_in(headrace: CommandLine, fake_engine: list[EngineConfig]) -> None:
    assert headrace("bench", "smollm2", "single", "--json") == 0, headrace.err
    single = json.loads(headrace.out)["workloads"]["single"]
    assert (single["num_prompt_tokens"], single["num_output_tokens"]) == (128, 512)
    assert "did you mean 'single'" in headrace.fails("bench", "smollm2", "singel")


def test_a_servers_own_name_needs_no_model_here() -> None:
    for name in ("an-alias", "some/model"):
        config = EngineConfig.from_options(model=name)
        assert find_workloads("single", None, config, is_remote=True) == {"single": make_workload("single")}
    with pytest.raises(CheckpointError):
        find_workloads("single", None, EngineConfig.from_options(model="an-alias"))


def test_the_model_may_be_left_out(headrace: CommandLine, fake_engine: list[EngineConfig], path: str) -> None:
    for arguments in ([path], [path, "--only", "short"], ["--seed", "3", path]):
        assert headrace("bench", *arguments) == 0, headrace.err
    assert [config.model.model for config in fake_engine] == ["smollm2"] * 3


def test_the_requests_of_the_gpu_table() -> None:
    shapes = {name: make_workload(name) for name in BUILT_IN}
    sizes = {
        name: (len(made), sum(len(r.prompt_ids) for r in made), sum(r.output_len for r in made))
        for name, made in shapes.items()
    }
    assert sizes == SIZES
    assert "single 1/128/512, b64 64/66k/16k, sharegpt 1000/246k/204k," in sizes_text()
    assert "prefix 256/2.1M/33k" in sizes_text()
    heads = {tuple(request.prompt_ids[:8192]) for request in shapes["prefix"]}
    assert len(heads) == 1 and len(shapes["prefix"][0].prompt_ids) == 8192 + 64
    assert all(token < 300 for token in make_workload("single", 300)[0].prompt_ids)
    assert (temperature_of("mix"), temperature_of("nano"), temperature_of("b64")) == (0.6, 0.6, 0.0)


def test_work_of_a_dense_step() -> None:
    arch = load_architecture(resolve_model("smollm2"))
    work = ModelWork.of(arch, 2)
    meter = StepMeter.__new__(StepMeter)
    meter.device_ms, meter.num_tokens, meter.num_sampled = [1.0], 1, 1
    meter.kv_tokens_read, meter.attention_pairs, meter.kv_bytes_per_token = 100, 100.0, 10.0
    weights = 134_479_872  # its matrices, the tied embedding once, as the head
    assert work.num_bytes(meter, 1) == 2 * weights + 101 * 10
    assert work.num_flops(meter) == 2 * weights + 100 * 4 * 9 * 64 * 30


def output(arrival: float, *token_times: list[float]) -> RequestOutput:
    answers = [CompletionOutput(i, "", [0] * len(times)) for i, times in enumerate(token_times)]
    metrics = RequestMetrics(arrival, token_times=list(token_times))
    return RequestOutput("r", None, [1, 2, 3], answers, True, num_cached_tokens=2, metrics=metrics)


def test_report_figures() -> None:
    figures = report([output(10.0, [10.5, 10.6, 10.8]), output(10.0, [11.0])], wall_s=2.0)
    assert figures["num_output_tokens"] == 4 and figures["output_tokens_per_s"] == 2.0
    assert figures["prompt_tokens_per_s"] == 3.0 and figures["num_cached_tokens"] == 4
    assert figures["ttft_ms"]["mean"] == pytest.approx(750) and figures["ttft_ms"]["p99"] == pytest.approx(
        1000
    )
    assert figures["itl_ms"]["p50"] == pytest.approx(100) and figures["itl_ms"]["p90"] == pytest.approx(200)
    assert figures["decode_tokens_per_s"] == pytest.approx(1 / 0.15)


def test_tokens_that_came_together_are_one_for_the_time_between_them() -> None:
    figures = report([output(10.0, [10.5, 10.6, 10.6, 10.8, 10.8])], wall_s=1.0)
    assert figures["itl_ms"]["p50"] == pytest.approx(100) and figures["itl_ms"]["mean"] == pytest.approx(150)
    assert figures["decode_tokens_per_s"] == pytest.approx(4 / 0.3)
    assert report([output(10.0, [10.5, 10.5])], wall_s=1.0)["decode_tokens_per_s"] == 0.0


def test_spread_is_by_nearest_rank() -> None:
    assert spread(range(1, 101)) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99}
    assert spread([7.0]) == {"mean": 7.0, "p50": 7.0, "p90": 7.0, "p99": 7.0}
    assert spread([]) == {}
