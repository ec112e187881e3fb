from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.process_client import ProcessClient
from tests.cli.conftest import CommandLine

ROOT = Path(__file__).parents[2]

# "1, 2, 3, 4, " as SmolLM2 spells it, a token every few milliseconds.
PROGRAM = """
import sys
from headrace.cli.chat import converse
from headrace.cli.chat_session import ChatSession
from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.process_client import ProcessClient
from headrace.sampling_params import SamplingParams

config = EngineConfig()
core = {"tokens": [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216], "step_s": 0.005}
build = sys.argv[2] if len(sys.argv) > 2 else "headrace.engine.null_core:build_null_core"
client = ProcessClient(CoreSpec(build, config, core))
converse(ChatSession(AsyncLLM(config, client), SamplingParams(max_tokens=int(sys.argv[1])), None))
"""


def test_lines_of_stdin_are_messages_and_stdout_holds_answers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "5"], cwd=ROOT, input="Count.\n\n/clear\nCount.\nAgain.\n",
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, third, rest = done.stdout.split("\n")
    assert first == second and rest == "" and third
    assert first != third  # the conversation has grown, so the made-up answer starts elsewhere


@pytest.fixture
def null_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(config: EngineConfig) -> AsyncLLM:
        core = {"tokens": [33, 28, 216], "step_s": 0.001}
        spec = CoreSpec("headrace.engine.null_core:build_null_core", config, core)
        return AsyncLLM(config, ProcessClient(spec))

    monkeypatch.setattr("headrace.engine.async_llm.AsyncLLM.from_config", start)


def test_a_model_without_a_template_is_refused(
    headrace: CommandLine, null_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    monkeypatch.setattr("headrace.tokenizer.Tokenizer.template_source", lambda *_: None)
    assert "headrace generate goes on" in headrace.fails("chat")


def test_what_a_script_is_not_answered_is_told_by_the_status(
    headrace: CommandLine, null_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n" + "x " * 9000 + "\nhi\n"))
    assert headrace("chat", "--max-tokens", "4") == 2
    assert headrace.out.count("\n") == 1, "the line before it is answered, none after it"
    assert headrace.err.startswith("headrace: ") and "max_model_len" in headrace.err


class Terminal:
    """The chat in a terminal of its own."""

    def __init__(self, max_tokens: int, *arguments: str) -> None:
        self.fd, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(max_tokens), *arguments],
            cwd=ROOT, stdin=other, stdout=other, stderr=other, start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self.seen = ""

    def until(self, text: str, timeout_s: float = 30) -> str:
        """Read until ``text`` comes; returns what came before it."""
        end = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 65536).decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    started = Terminal(100_000 // 16)
    yield started
    started.process.kill()
    started.process.wait()
    os.close(started.fd)


def test_ctrl_c_cancels_the_answer_alone(terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.type("Count.\n")
    terminal.until("1, 2, 3")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("(cancelled)")
    terminal.until("> ")
    time.sleep(0.5)  # a signal between the prompt and the wait for a key is seen at the next key only
    terminal.process.send_signal(signal.SIGINT)  # at the prompt it only clears the line
    terminal.until("> ")
    terminal.type("/nonsense\n")
    terminal.until("/retry answers")
    terminal.until("> ")
    terminal.type("/retry\n")
    terminal.until("2, 3, 4")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("(cancelled)")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


def test_ctrl_c_while_loading_ends() -> None:
    started = Terminal(10, "tests.cli.slow_core:build_slow_core")
    time.sleep(0.4)
    end = time.monotonic() + 20
    while started.process.poll() is None and time.monotonic() < end:
        # one that falls into an import may be lost, the next is not
        started.process.send_signal(signal.SIGINT)
        time.sleep(1)
    assert started.process.poll() not in (None, 0)
    os.close(started.fd)
