from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.cli.streaming import stream_answer
from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.process_client import ProcessClient
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    """An engine that counts as SmolLM2 spells it: "1, 2, 3, 4, "."""
    config = EngineConfig()
    core = {"tokens": [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216], "step_s": 0.02}
    client = ProcessClient(CoreSpec("headrace.engine.null_core:build_null_core", config, core))
    yield AsyncLLM(config, client)
    client.shutdown()


def test_parts_come_one_by_one(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[str] = []
    monkeypatch.setattr("sys.stdout.write", parts.append)
    stream_answer(llm, "Count.", SamplingParams(max_tokens=12, temperature=0))
    assert len([part for part in parts if part]) >= 6 and parts[-1] == "\n"
    assert all(f"{number}," in "".join(parts) for number in (1, 2, 3))


def test_a_conversation(llm: AsyncLLM, capsys: pytest.CaptureFixture[str]) -> None:
    stream_answer(
        llm, "", SamplingParams(max_tokens=6, temperature=0), [{"role": "user", "content": "Count."}]
    )
    assert capsys.readouterr().out.count("\n") == 1


def test_a_refused_prompt(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="max_model_len"):
        stream_answer(llm, "x " * 9000, SamplingParams(max_tokens=1))
