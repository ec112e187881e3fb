"""The example programs, each run small: over a real engine core with real grammars and a made-up model."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.thread_client import ThreadClient
from headrace.lang import Backend
from headrace.lang.local import LocalBackend

FOLDER = Path(__file__).parents[2] / "examples" / "lang"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def noise() -> Iterator[Backend]:
    config = EngineConfig.from_options(model="smollm2")
    spec = CoreSpec("tests.serve.odd_cores:masked", config)
    with LocalBackend(lambda: AsyncLLM(config, ThreadClient(spec))) as backend:
        yield backend


def test_few_shot_classification(noise: Backend) -> None:
    example = load("few_shot_classification")
    labels = example.run(noise)
    assert len(labels) == len(example.REVIEWS) and set(labels) <= set(example.LABELS)
    assert labels == example.run(noise)


def test_tree_of_thought(noise: Backend) -> None:
    example = load("tree_of_thought")
    state = example.tree_of_thought.run(noise, question="What is 1 + 1?")
    assert isinstance(state["return"], str)
    assert example.run(noise) == example.run(noise)


def test_skeleton_of_thought(noise: Backend) -> None:
    example = load("skeleton_of_thought")
    lines = example.run(noise)
    assert all(f"{number + 1}. " in lines for number in range(example.NUM_POINTS))


def test_react_agent(noise: Backend) -> None:
    example = load("react_agent")
    assert len(example.run(noise)) == len(example.QUESTIONS)
    assert example.look_up("Where is FRANCE?").startswith("Paris") and example.add("12 + 30") == "42"


def test_llm_judge(noise: Backend) -> None:
    example = load("llm_judge")
    *notes, whole = example.run(noise).split("\nwhole: ")
    assert whole in example.GRADES and all(respect in notes[0] for respect in example.RESPECTS)


def test_json_extraction(noise: Backend) -> None:
    example = load("json_extraction")
    example.SCHEMA["properties"]["name"] = {"enum": ["Danube", "Minka"]}  # noise would run on in a free text
    for facts in example.run(noise):
        assert set(facts) == {"name", "kind", "is_alive"} and isinstance(facts["is_alive"], bool)


def test_multi_turn_chat(noise: Backend) -> None:
    example = load("multi_turn_chat")
    answers = example.run(noise)
    assert [len(own) for own in answers] == [len(own) for own in example.CONVERSATIONS]
    assert answers == example.run(noise)


@pytest.mark.parametrize("name", [file.stem for file in sorted(FOLDER.glob("*.py"))])
def test_without_a_server_a_script_ends_by_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"examples/lang/{name}.py", "http://127.0.0.1:1"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert str(end.value).startswith(f"{name}.py: http://127.0.0.1:1 cannot be reached")
    assert "\n" not in str(end.value)
    assert capsys.readouterr().out == ""


def test_the_page_is_right(
    noise: Backend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of docs/lang.md runs."""
    page = (FOLDER.parents[1] / "docs" / "lang.md").read_text()
    source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    monkeypatch.setattr("headrace.lang.local", lambda model: contextlib.nullcontext(noise))
    exec(compile(source, "lang.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith(("good", "bad"))
