from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.engine_options import flag_of, read_settings
from headrace.config import EngineConfig, option_owners
from headrace.errors import ConfigError
from tests.cli.conftest import CommandLine


def test_every_setting_has_a_flag_with_its_doc(headrace: CommandLine) -> None:
    assert headrace("generate", "--help") == 0
    words = " ".join(headrace.out.split())
    for name in option_owners():
        assert name == "model" or flag_of(name) in words
    assert "tokens in one KV block; a power of two (default 16)" in words
    assert "--enable-prefix-caching / --no-enable-prefix-caching" in words


def test_flags_reach_the_configuration(headrace: CommandLine, fake_engine: list[EngineConfig]) -> None:
    flags = [
        "--block-size",
        "32",
        "--no-enable-prefix-caching",
        "--max-stall-ms",
        "100",
        "--policy",
        "priority",
    ]
    assert headrace("generate", "smollm2", "--prompt", "x", "--max-tokens", "1", *flags) == 0, headrace.err
    (config,) = fake_engine
    assert (config.cache.block_size, config.cache.enable_prefix_caching) == (32, False)
    assert (config.scheduler.max_stall_ms, config.scheduler.policy) == (100.0, "priority")
    assert config.scheduler.max_num_seqs == EngineConfig().scheduler.max_num_seqs


def test_sizes_may_have_a_unit_wherever_they_are_written(headrace: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("cache: {kv_cache_bytes: 512 MiB}\nserver: {max_body_bytes: 64kib}\n")
    flags = ["--config", str(path), "--host-cache-bytes", "4GiB", "--disk-cache-bytes=123456789", "--json"]
    assert headrace("explain", *flags, "--disk-cache-path", str(tmp_path)) == 0, headrace.err
    values = {row["name"]: row["value"] for row in json.loads(headrace.out)}
    sizes = [values[f"{name}_bytes"] for name in ("kv_cache", "max_body", "host_cache", "disk_cache")]
    assert sizes == [512 << 20, 64 << 10, 4 << 30, 123456789]
    assert EngineConfig.from_options(kv_cache_bytes="1 TiB").cache.kv_cache_bytes == 1 << 40
    for wrong in ("", "GiB", "1.5GiB", "4G", "4 294", "٣", "9" * 5000):
        with pytest.raises(ConfigError, match="4294967296 or 4GiB"):
            EngineConfig.from_options(kv_cache_bytes=wrong)


def test_file_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("cache: {block_size: 64, min_copy_tokens: 2}\nmodel: {model: other}\n")
    settings = read_settings(path, {"model": None, "block_size": 8, "seed": 3, "dtype": None})
    assert settings.config.cache.block_size == 8 and settings.config.cache.min_copy_tokens == 2
    assert settings.config.model.model == "other"
    assert settings.origins == {
        "block_size": "--block-size",
        "min_copy_tokens": "engine.yaml",
        "model": "engine.yaml",
        "seed": "--seed",
    }
    assert read_settings(path, {"model": "mine"}).origins["model"] == "MODEL"


def test_an_unknown_key_in_the_file_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("cache: {blok_size: 64}\n")
    with pytest.raises(ConfigError, match="'block_size'"):
        read_settings(path, {})


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("# nothing yet\n")
    settings = read_settings(path, {})
    assert settings.config == EngineConfig() and settings.origins == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("block_size: 32\n", "'block_size' belongs under section 'cache'"),
        ("cache: {blok_size: 32}\n", "did you mean 'block_size'?"),
        ("cahce: {block_size: 32}\n", "did you mean 'cache'?"),
        ("cache: {block_size: 3}\n", "power of two"),
    ],
)
def test_mistakes_in_a_file_name_it(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings(path, {})
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_mistake_in_a_flag_does_not_blame_the_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("cache: {block_size: 32}\n")
    with pytest.raises(ConfigError) as caught:
        read_settings(path, {"block_size": 3})
    assert str(path) not in str(caught.value)
