"""The README's examples, run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headrace.cli.engine_options import read_settings
from headrace.cli.main import run
from headrace.config import EngineConfig

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """The ``headrace`` commands that end by themselves."""
    lines = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    found = [line.split("  #")[0].strip() for line in lines if line.startswith("headrace ")]
    return [line for line in found if not re.search(r"headrace (serve|chat)", line)]


def test_there_is_something_to_run() -> None:
    assert blocks("python") and blocks("yaml") and len(commands()) >= 2


@pytest.mark.parametrize("source", blocks("python"), ids=lambda source: source.split("\n")[0])
def test_python(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "openai" in source:
        pytest.skip("needs a running server; run by the server's tests")
    exec(compile(source, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("command", commands())
def test_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("source", blocks("yaml"))
def test_yaml(source: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(source)
    assert read_settings(path, {}).config != EngineConfig()
