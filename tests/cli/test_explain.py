from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.cli.automatic_choices import of_templates
from headrace.config import option_owners
from headrace.serve.settings import ServerConfig
from tests.cli.conftest import CommandLine


def rows(headrace: CommandLine, *arguments: str) -> dict[str, dict[str, object]]:
    assert headrace("explain", *arguments, "--json") == 0, headrace.err
    return {row["name"]: row for row in json.loads(headrace.out)}


def test_every_setting_is_there_with_its_origin(headrace: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("cache: {block_size: 64}\nscheduler: {max_num_seqs: 4}\n")
    found = rows(headrace, "smollm2", "--config", str(path), "--block-size", "32", "--device", "cpu")
    names = [field.name for field in fields(ServerConfig)]
    assert list(found) == [*option_owners(), *names]
    assert (found["block_size"]["value"], found["block_size"]["origin"]) == (32, "--block-size")
    assert (found["max_num_seqs"]["value"], found["max_num_seqs"]["origin"]) == (4, "engine.yaml")
    assert (found["policy"]["value"], found["policy"]["origin"]) == ("fcfs", "default")
    assert all(row["why"] for row in found.values())


def test_choices_left_to_the_engine_are_resolved(headrace: CommandLine) -> None:
    found = rows(headrace, "smollm2", "--device", "cpu", "--max-num-batched-tokens", "512")
    assert (found["max_model_len"]["given"], found["max_model_len"]["value"]) == (None, 8192)
    assert found["load_format"]["value"] == "gguf" and found["served_model_name"]["value"] == "smollm2"
    assert found["dtype"]["value"] in ("float32", "bfloat16")
    assert found["kv_cache_dtype"]["value"] == found["dtype"]["value"]
    assert found["kernels"]["value"] in ("native", "reference")
    assert (found["max_graph_tokens"]["value"], found["attention_library"]["value"]) == (0, "off")
    assert found["max_prefill_chunk"]["value"] == 512 and int(str(found["threads"]["value"])) >= 1


def test_nothing_is_left_at_auto(headrace: CommandLine) -> None:
    found = rows(headrace, "smollm2", "--device", "cpu")
    assert [name for name, row in found.items() if row["value"] == "auto"] == []


def test_forms_of_weights_are_those_that_loading_takes(headrace: CommandLine) -> None:
    settings = ("smollm2", "--device", "cpu")
    found = rows(headrace, *settings)
    if found["kernels"]["value"] == "native":
        assert (found["quantization"]["value"], found["linear_inputs"]["value"]) == ("Q4_1, Q8_0", "int16")
    found = rows(headrace, *settings, "--kernels", "reference")
    assert (found["quantization"]["value"], found["linear_inputs"]["value"]) == ("dense", "float")
    assert "decoded while loading" in str(found["quantization"]["why"])
    found = rows(headrace, *settings, "--linear-inputs", "int8")
    assert (found["linear_inputs"]["given"], found["linear_inputs"]["value"]) == ("int8", "int8")


def test_a_second_rounding_is_warned_of(headrace: CommandLine) -> None:
    found = rows(headrace, "smollm2", "--device", "cpu", "--quantization", "int4")
    assert found["quantization"]["value"] == "int4"
    assert "WARNING" in str(found["quantization"]["why"]) and "Q4_1" in str(found["quantization"]["why"])
    assert "WARNING" not in str(rows(headrace, "--device", "cpu")["quantization"]["why"])


def test_what_the_chat_template_decides(headrace: CommandLine) -> None:
    found = rows(headrace, "smollm2", "--device", "cpu")
    assert (found["tool_parser"]["value"], found["reasoning_parser"]["value"]) == ("hermes", "none")
    found = rows(headrace, "--device", "cpu", "--skip-tokenizer-init")
    assert found["tool_parser"]["value"] is None and "tokenizer" in str(found["tool_parser"]["why"])


@pytest.mark.parametrize(
    ("template", "tool_parser", "reasoning_parser"),
    [
        ("{{ messages }}", "hermes", "none"),
        ("{{ tools }}<tool_call></tool_call><think></think>", "hermes", "think"),
        ("{{ tools }}[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("{{ tools }}", None, "none"),
    ],
)
def test_templates(template: str, tool_parser: str | None, reasoning_parser: str) -> None:
    found = of_templates(template, template)
    assert (found["tool_parser"][0], found["reasoning_parser"][0]) == (tool_parser, reasoning_parser)


def test_what_is_decided_per_step_or_not_at_all_says_so(headrace: CommandLine) -> None:
    found = rows(headrace, "smollm2", "--device", "cpu", "--host-cache-bytes", "64MiB")
    assert found["cascade"]["value"] == "per step" and "cost model" in str(found["cascade"]["why"])
    assert found["tier_cache_dtype"]["value"] == found["kv_cache_dtype"]["value"]
    found = rows(headrace, "smollm2", "--device", "cpu", "--cascade", "on")
    assert found["cascade"]["value"] == "on"
    assert found["tier_cache_dtype"]["value"] is None and found["all_reduce"]["value"] is None


def test_what_the_engine_would_refuse_is_refused(headrace: CommandLine) -> None:
    assert headrace("explain", "smollm2", "--device", "cpu", "--attention-library", "cudnn") == 2
    assert "needs an NVIDIA GPU" in headrace.err


def test_own_settings_are_not_overruled(headrace: CommandLine) -> None:
    found = rows(
        headrace, "--device", "cpu", "--dtype", "float16", "--threads", "3", "--max-model-len", "100"
    )
    assert (found["dtype"]["value"], found["dtype"]["origin"]) == ("float16", "--dtype")
    assert (found["threads"]["value"], found["max_model_len"]["value"]) == (3, 100)


def test_text(headrace: CommandLine) -> None:
    assert headrace("explain", "smollm2", "--device", "cpu", "--no-enable-prefix-caching") == 0
    assert "cache:\n" in headrace.out and "the model's own context" in headrace.out
    (line,) = [line for line in headrace.out.splitlines() if line.startswith("  enable_prefix_caching")]
    assert line.split()[:3] == ["enable_prefix_caching", "off", "--no-enable-prefix-caching"]


def test_a_context_beyond_the_models(headrace: CommandLine) -> None:
    assert "8192" in headrace.fails("explain", "smollm2", "--device", "cpu", "--max-model-len", "9000")


def test_kv_memory(headrace: CommandLine) -> None:
    bytes_per_block = 16 * 30 * 2 * 3 * 64 * 4  # tokens, layers, keys and values, KV heads, head size, fp32
    found = rows(
        headrace, "--device", "cpu", "--dtype", "float32", "--kv-cache-bytes", str(520 * bytes_per_block + 1)
    )
    assert found["num_kv_blocks"]["value"] == 520
    found = rows(headrace, "--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "600")
    assert found["kv_cache_bytes"]["value"] == 600 * bytes_per_block
    found = rows(headrace, "--device", "cpu", "--dtype", "float32")
    assert found["kv_cache_bytes"]["value"] == int(str(found["num_kv_blocks"]["value"])) * bytes_per_block
    message = headrace.fails(
        "explain", "--device", "cpu", "--dtype", "float32", "--kv-cache-bytes", "1000000"
    )
    assert "max_model_len" in message


def test_impossible_numbers_of_ranks_are_refused_as_by_the_engine(headrace: CommandLine) -> None:
    message = headrace.fails("explain", "smollm2", "--device", "cpu", "--tensor-parallel-size", "2")
    assert "tensor_parallel_size 2" in message and "1 or 3 ranks" in message


def test_kv_memory_is_of_one_rank(headrace: CommandLine) -> None:
    settings = ("--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "600")
    whole = int(str(rows(headrace, *settings)["kv_cache_bytes"]["value"]))
    for sizes in (("--tensor-parallel-size", "3"), ("--pipeline-parallel-size", "3")):
        assert rows(headrace, *settings, *sizes)["kv_cache_bytes"]["value"] == whole // 3
