from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.cli.main import run
from headrace.config import EngineConfig
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.engine import llm
from headrace.engine.assemble import assemble
from headrace.engine.engine_core import EngineCore
from headrace.errors import ConfigError
from headrace.runtime.fake_executor import FakeExecutor
from headrace.serve.settings import ServerConfig


class CommandLine:
    """Runs commands in this process and keeps what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        code = run(list(arguments))
        self.out, self.err = self._capsys.readouterr()
        return code

    def fails(self, *arguments: str, code: int = 2) -> str:
        """The one line on stderr of a command that must fail, printing nothing else."""
        assert self(*arguments) == code, self.err
        assert self.out == "" and self.err.startswith("headrace: ") and self.err.count("\n") == 1
        return self.err


@pytest.fixture
def headrace(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Commands load the real tokenizer of smollm2 and an engine whose next token is the last one plus one.

    The list holds the configurations that engines were built from.
    """
    configs: list[EngineConfig] = []

    def build(
        config: EngineConfig,
        progress: Callable[[str, float], Any] | None = None,
        *,
        is_offline: bool = False,
    ) -> EngineCore:
        configs.append(config)
        specs = [KVCacheSpec("full", (0,), 64)]
        executor = FakeExecutor(
            specs,
            256,
            config.cache.block_size,
            vocab_size=49152,
            next_token=lambda ids, child: ids[-1] + 1 + child,
        )
        return assemble(config, executor)

    monkeypatch.setattr(llm, "build_engine_core", build)
    return configs


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """``serve`` stops where it would open its port; the settings that it got so far."""
    found: list[ServerConfig] = []

    def open_port(config: ServerConfig) -> None:
        found.append(config)
        raise ConfigError("that is all")

    monkeypatch.setattr("headrace.serve.port.open_port", open_port)
    return found
