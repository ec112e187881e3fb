"""The command over the real tokenizer of smollm2 and a made-up model: each next token is the last one plus one."""

from __future__ import annotations

import io

import pytest

from headrace.checkpoint import resolve_model
from headrace.cli.generate import read_prompt
from headrace.config import EngineConfig
from headrace.tokenizer import load_tokenizer
from tests.cli.conftest import CommandLine

TOKENIZER = load_tokenizer(resolve_model("smollm2"))


def continuation(prompt: str, count: int, child: int = 0) -> str:
    last = TOKENIZER.encode(prompt)[-1]
    return TOKENIZER.decode([last + i * (1 + child) for i in range(1, count + 1)])


def lines(*texts: str) -> str:
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts)


@pytest.fixture(autouse=True)
def engines(fake_engine: list[EngineConfig]) -> list[EngineConfig]:
    return fake_engine


def test_stdout_is_the_text_alone(headrace: CommandLine) -> None:
    assert (
        headrace("generate", "smollm2", "--prompt", "Hello there", "--max-tokens", "5", "--temperature", "0")
        == 0
    )
    assert headrace.out == lines(continuation("Hello there", 5))
    assert headrace.err == ""


def test_several_prompts_and_answers(headrace: CommandLine) -> None:
    assert headrace("generate", "--prompt", "Hello", "-p", "One two", "-n", "2", "--max-tokens", "3") == 0
    expected = [continuation(prompt, 3, child) for prompt in ("Hello", "One two") for child in (0, 1)]
    assert headrace.out == lines(*expected)


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_prompt_from_stdin(headrace: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, b"Hello there\n")
    assert headrace("generate", "--prompt", "-", "--max-tokens", "2") == 0
    assert headrace.out == lines(continuation("Hello there", 2))


def test_chat_applies_the_template(headrace: CommandLine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = TOKENIZER.apply_chat_template(messages)
    arguments = ["--chat", "--system", "Be brief.", "--prompt", "Hi", "--max-tokens", "4"]
    assert headrace("generate", *arguments) == 0
    assert headrace.out == lines(continuation(prompt, 4))


def test_chat_without_a_template_says_what_works(
    headrace: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.tokenizer.Tokenizer.template_source", lambda *_: None)
    assert "no chat template" in headrace.fails("generate", "--chat", "--prompt", "Hi")
    assert "leave out --chat" in headrace.fails("generate", "--chat", "--prompt", "Hi")


def test_stop(headrace: CommandLine) -> None:
    text = continuation("Hello there", 8)
    stop = text[10:13]
    assert headrace("generate", "--prompt", "Hello there", "--max-tokens", "8", "--stop", stop) == 0
    assert headrace.out == lines(text[: text.find(stop)])


def test_a_refused_prompt_is_one_line(headrace: CommandLine) -> None:
    assert "max_model_len" in headrace.fails("generate", "--prompt", "a b c d e f", "--max-model-len", "3")


def test_a_failed_answer_is_told_after_the_others(headrace: CommandLine) -> None:
    prompt = "x " * 5000  # can never fit into the 256 blocks of 16 tokens
    assert headrace("generate", "--prompt", prompt, "--prompt", "Hello", "--max-tokens", "2") == 2
    assert headrace.out == lines(continuation("Hello", 2))
    assert "never fit" in headrace.err and headrace.err.count("\n") == 1


def test_only_one_newline_of_stdin_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, b"a\n\n")
    assert read_prompt("-") == "a\n"
    assert read_prompt("b\n") == "b\n"


@pytest.mark.parametrize(
    ("data", "prompt", "words"),
    [(b"caf\xe9", "-", "not UTF-8"), (b"\n", "-", "stdin is empty"), (b"", "", "--prompt is empty")],
)
def test_a_wrong_prompt_is_refused_before_loading(
    headrace: CommandLine, engines: list[EngineConfig], monkeypatch: pytest.MonkeyPatch,
    data: bytes, prompt: str, words: str,
) -> None:  # fmt: skip
    feed(monkeypatch, data)
    assert words in headrace.fails("generate", "--prompt", prompt) and not engines


def test_a_terminal_gets_one_answer_as_it_comes(
    headrace: CommandLine, engines: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = []
    monkeypatch.setattr("headrace.engine.async_llm.AsyncLLM.from_config", lambda config, **_: config)
    monkeypatch.setattr("headrace.cli.generate.stream_answer", lambda *given: streamed.append(given[1]))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert headrace("generate", "--prompt", "Hello") == 0 and streamed == ["Hello"] and not engines
    assert headrace("generate", "--prompt", "Hello", "-n", "2", "--max-tokens", "1") == 0 and engines
    assert streamed == ["Hello"]
