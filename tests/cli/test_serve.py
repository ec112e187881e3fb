from __future__ import annotations

import pytest

from tests.cli.conftest import CommandLine


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smolm2"], "did you mean 'smollm2'?"),
        (["no/such/model.gguf"], "no such file"),
        (["smollm2", "--max-model-len", "9000"], "8192"),
        (["smollm2", "--tensor-parallel-size", "2"], "tensor_parallel_size"),
        (["smollm2", "--pipeline-parallel-size", "31"], "30 layers"),
    ],
)
def test_mistakes_are_told_before_the_port_opens(
    headrace: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    def open_port(*_: object) -> None:
        raise AssertionError("the port was opened")

    monkeypatch.setattr("headrace.serve.port.open_port", open_port)
    assert words in headrace.fails("serve", *arguments)
