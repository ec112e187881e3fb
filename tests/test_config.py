from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("seed", 1 << 63, (1 << 63) - 1),
        ("seed", -(1 << 63) - 1, -(1 << 63)),
        ("seed", 1 << 1100, 0),
        ("max_model_len", 1, 2),
        ("max_stall_ms", 1 << 1100, 1),
        ("max_stall_ms", float("nan"), 1e9),
        ("block_size", 24, 32),
    ],
)
def test_ranges(name: str, wrong: float, right: float) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_options(**{name: wrong})
    EngineConfig.from_options(**{name: right})


@pytest.mark.parametrize("name", ["model", "served_model_name", "disk_cache_path"])
def test_text_that_is_not_utf8(name: str) -> None:
    """It could not be sent to the engine's process."""
    with pytest.raises(ConfigError, match=rf"{name} is .*not UTF-8"):
        EngineConfig.from_options(**{"host_cache_bytes": 1 << 30, name: "/data/kv\udcff"})


@pytest.mark.parametrize(
    "text",
    [
        b"1: {}",
        b"true: {}",
        b"null: {}",
        b"2020-01-01: {}",
        b"model: {1: 2}",
        b"cache: {null: 2}",
        b"[1]: 2",
        b"cache: 5",
        b"- 1",
        b"\xff\xfe\x00",
        b"model: {model: \xe9}",
        b"x: 2020-99-99",
        b"[" * 100_000,
        b"{",
    ],
)
def test_files_that_hold_no_settings(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError):
        EngineConfig.load(path)


@pytest.mark.parametrize("text", ["cache: {\n", "cache:\n  - a\n  b: 1\n", "cache: \0\n"])
def test_broken_yaml_is_told_of_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(path)
    assert f'in "{path}"' in str(caught.value) and "unicode string" not in str(caught.value)


def test_a_file_and_options_over_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {model: é, seed: 3}\ncache: {block_size: 32}\n", encoding="utf-8")
    config = EngineConfig.load(path, seed=4, block_size=None)
    assert (config.model.model, config.model.seed, config.cache.block_size) == ("é", 4, 32)


TIERS = {"host_cache_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"disk_cache_path": "", **TIERS}, {"disk_cache_path": ".", **TIERS}),
        ({"disk_cache_path": " ", **TIERS}, {"disk_cache_path": "kv", **TIERS}),
        ({"disk_cache_path": "a\0b", **TIERS}, {"disk_cache_path": "a b", **TIERS}),
        ({"disk_cache_path": "~no-such-user/kv", **TIERS}, {"disk_cache_path": "~/kv", **TIERS}),
        ({"disk_cache_path": "kv"}, {"disk_cache_path": "kv", **TIERS}),
        ({"tier_cache_dtype": "int8"}, {"tier_cache_dtype": "int8", **TIERS}),
        ({"disk_cache_bytes": 1 << 30}, {"disk_cache_bytes": 16 << 30}),
        (
            {"disk_cache_bytes": 1 << 30, **TIERS},
            {"disk_cache_bytes": 1 << 30, "disk_cache_path": "kv", **TIERS},
        ),
        ({"enable_prefix_caching": False, **TIERS}, {"enable_prefix_caching": False}),
        ({**TIERS, "tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        ({"max_prefix_length": 15}, {"max_prefix_length": 16}),
        ({"max_prefix_length": 16, "block_size": 32}, {"max_prefix_length": 16}),
    ],
)
def test_settings_that_would_have_no_effect(wrong: dict[str, object], right: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig.from_options(**wrong)
    EngineConfig.from_options(**right)
