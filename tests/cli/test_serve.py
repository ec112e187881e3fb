from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.cli.engine_options import read_settings
from headrace.config import option_owners
from headrace.serve.settings import ServerConfig
from tests.cli.conftest import CommandLine

ROOT = Path(__file__).parents[2]


FILE = "server: {port: 9000, host: 0.0.0.0, api_key: sesame, drain_s: 5}\ncache: {block_size: 32}\n"


def test_the_file_has_a_section_for_the_server_and_flags_win(
    headrace: CommandLine, started: list[ServerConfig], tmp_path: Path
) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(FILE)
    headrace.fails("serve", "smollm2", "--config", str(path), "--port", "9001", "--tool-parser", "hermes")
    assert started == [
        ServerConfig(host="0.0.0.0", port=9001, api_key="sesame", drain_s=5.0, tool_parser="hermes")
    ]
    headrace.fails("serve", "smollm2")
    assert started[1:] == [ServerConfig()]


def test_explain_shows_the_servers_settings_but_no_key(headrace: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(FILE)
    assert headrace("explain", "smollm2", "--config", str(path), "--json") == 0
    rows = {row["name"]: row for row in json.loads(headrace.out) if row["section"] == "server"}
    assert (rows["port"]["value"], rows["port"]["origin"]) == (9000, "all.yaml")
    assert (rows["load_wait_s"]["value"], rows["load_wait_s"]["origin"]) == (120.0, "default")
    assert set(rows) == {field.name for field in fields(ServerConfig)} and "sesame" not in headrace.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server: {prot: 1}", "section 'server': unknown setting 'prot'; did you mean 'port'?"),
        ("sever: {port: 1}", "did you mean 'server'?"),
        ("port: 80", "'port' belongs under section 'server'"),
        ("server: {port: 99999}", "port must be in [0, 65535]"),
        ("server: {port: '80'}", "port must be of type int"),
        ("server: [80]", "section 'server' must hold settings"),
        ("server: {port: 80, port: 81}", "line 1 has the name 'port' a second time"),
        ("server: {port: 80}\nserver: {port: 81}", "line 2 has the name 'server' a second time"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "explain"])
def test_mistakes_in_the_servers_section_name_the_file(
    headrace: CommandLine, tmp_path: Path, command: str, text: str, words: str
) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(text)
    message = headrace.fails(command, "smollm2", "--config", str(path))
    assert words in message and str(path) in message


def test_a_wrong_flag_does_not_blame_the_file(headrace: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(FILE)
    message = headrace.fails("serve", "smollm2", "--config", str(path), "--port", "99999")
    assert "port must be" in message and str(path) not in message


def test_the_file_in_the_docs(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)
    path = tmp_path / "all.yaml"
    path.write_text(text)
    assert read_settings(path, {}).server["port"] == 8080


def test_no_setting_has_two_owners() -> None:
    assert not {field.name for field in fields(ServerConfig)} & set(option_owners())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smolm2"], "did you mean 'smollm2'?"),
        (["no/such/model.gguf"], "no such file"),
        (["smollm2", "--max-model-len", "9000"], "8192"),
        (["smollm2", "--tensor-parallel-size", "2"], "tensor_parallel_size"),
        (["smollm2", "--pipeline-parallel-size", "31"], "30 layers"),
        (["smollm2", "--quantization", "int3"], "'int3' is not known"),
        (["smollm2", "--quantization-overrides", "lm_head"], "pattern=form"),
    ],
)
def test_mistakes_are_told_before_the_port_opens(
    headrace: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    def open_port(*_: object) -> None:
        raise AssertionError("the port was opened")

    monkeypatch.setattr("headrace.serve.port.open_port", open_port)
    assert words in headrace.fails("serve", *arguments)
