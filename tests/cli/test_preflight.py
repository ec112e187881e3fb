"""What is told of an impossible start before a port is opened or a weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.serve.settings import ServerConfig
from tests.cli.conftest import CommandLine

GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
}


@pytest.fixture
def gemma3(tmp_path: Path) -> str:
    """A folder with nothing but a description, of a model with sliding layers."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host-cache-bytes", "1MiB"), "host_cache_bytes: cache tiers hold models whose layers all keep"),
        (("--quantization", "int5"), "quantization 'int5' is not known"),
        (("--quantization-overrides", "lm_head"), "write pattern=form"),
        (("--quantization-overrides", "model.layers.9.*=int8"), "which no module of the model matches"),
        (("--tensor-parallel-size", "3"), "tensor_parallel_size 3 does not suit"),
        (("--max-model-len", "1000"), "512"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "explain"])
def test_what_settings_and_description_tell(
    headrace: CommandLine,
    started: list[ServerConfig],
    gemma3: str,
    command: str,
    options: tuple[str, str],
    words: str,
) -> None:
    assert words in headrace.fails(command, gemma3, "--device", "cpu", *options)
    assert not started, "no port was opened"


def test_explain_refuses_forms_of_tiers_that_do_not_suit_the_heads(
    headrace: CommandLine, tmp_path: Path
) -> None:
    odd = GEMMA3 | {"model_type": "llama", "head_dim": 12}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    settings = (
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--skip-tokenizer-init",
        "--host-cache-bytes",
        "1MiB",
    )
    assert headrace("explain", str(tmp_path), *settings) == 0, headrace.err
    message = headrace.fails("explain", str(tmp_path), *settings, "--tier-cache-dtype", "int4")
    assert "tier_cache_dtype 'int4' needs a head size" in message
