"""Constraints for tools, put to the grammars that enforce them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.grammar.answer_check import AnswerCheck
from headrace.serve.errors import ApiError
from headrace.serve.tools.constraint import constrained_params
from headrace.serve.tools.events import ParsedAnswer
from headrace.serve.tools.reasoning import REASONING_PARSERS, ReasoningTags
from headrace.serve.tools.registry import FORMATS
from headrace.serve.tools.tool_parser import CallRules
from headrace.serve.tools.tool_use import ToolUse, tool_use_of
from headrace.structured_outputs import StructuredOutputsParams
from tests.serve.tools.answers import ids

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FRAMED = sorted(name for name, form in FORMATS.items() if form.frame("f") is not None)
GOOD = ("get_weather", {"city": "Rome"})
BAD = ("get_weather", {"city": "Oslo"})
FREE = ("note", {"text": "any", "n": [1]})


def use_of(choice: Any = None, parallel: bool = True, strict: bool = False) -> ToolUse:
    tools = [
        {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": strict}},
        {"type": "function", "function": {"name": "note"}},
    ]
    use = tool_use_of(tools, choice, parallel)
    assert use is not None
    return use


def check_of(
    use: ToolUse | None,
    form: str,
    thought: ReasoningTags | None = None,
    wanted: StructuredOutputsParams | None = None,
) -> AnswerCheck:
    params = constrained_params(use, FORMATS[form], thought, wanted)
    assert params is not None
    return AnswerCheck(params.to_constraint())


@pytest.mark.parametrize("form", FRAMED)
def test_required_calls(form: str) -> None:
    write = FORMATS[form].render
    check = check_of(use_of("required"), form)
    for calls in ([GOOD], [FREE], [GOOD, FREE, GOOD]):
        text = write(calls)
        assert check.problem(text) is None, text
        parsed = ParsedAnswer()
        parser = FORMATS[form].parser(CallRules(["get_weather", "note"], ids()))
        parsed.add(parser.feed(text) + parser.finish(is_cut=False))
        assert [call.name for call in parsed.calls] == [name for name, _ in calls] and not parsed.content
    for text in (
        "",
        "words",
        "words" + write([GOOD]),
        write([BAD]),
        write([GOOD]) + " and",
        write([("other", {})]),
    ):
        assert check.problem(text) is not None, text


@pytest.mark.parametrize("form", FRAMED)
def test_named_and_single_calls(form: str) -> None:
    write = FORMATS[form].render
    named = check_of(use_of({"type": "function", "function": {"name": "get_weather"}}), form)
    assert named.problem(write([GOOD])) is None
    assert named.problem(write([FREE])) is not None and named.problem(write([GOOD, GOOD])) is not None
    single = check_of(use_of("required", parallel=False), form)
    assert single.problem(write([FREE])) is None and single.problem(write([GOOD, FREE])) is not None


@pytest.mark.parametrize("form", FRAMED)
def test_strict_functions_in_free_text(form: str) -> None:
    write = FORMATS[form].render
    assert constrained_params(use_of(), FORMATS[form], None, None) is None
    check = check_of(use_of(strict=True), form)
    for text in ("words, {} and so on", write([GOOD]), write([FREE])):
        assert check.problem(text) is None, text
    assert check.problem(write([BAD])) is not None
    if form != "llama3_json":
        assert check.problem("Well: " + write([GOOD]) + " there.") is None
        assert check.problem("Well: " + write([BAD]) + " there.") is not None


def test_constraints_on_the_text() -> None:
    write = FORMATS["hermes"].render
    for wanted, good, bad in (
        (StructuredOutputsParams(json=SCHEMA), '{"city": "Paris"}', '{"city": 1}'),
        (StructuredOutputsParams(json_object=True), "{}", "[]"),
        (StructuredOutputsParams(regex="[ab]+"), "abba", "abc"),
        (StructuredOutputsParams(choice=["yes", "no"]), "no", "maybe"),
    ):
        check = check_of(use_of(), "hermes", wanted=wanted)
        assert check.problem(good) is None and check.problem(write([FREE])) is None
        assert check.problem(bad) is not None and check.problem("words") is not None
        thinking = check_of(None, "hermes", REASONING_PARSERS["think"], wanted)
        assert thinking.problem(f"hm {bad}</think>\n\n{good}") is None
        assert thinking.problem(f"hm</think>{bad}") is not None and thinking.problem(good) is not None
    params = StructuredOutputsParams(regex="a")
    assert constrained_params(None, FORMATS["hermes"], None, params) is params


def test_thought_before_required_calls_is_free() -> None:
    check = check_of(use_of("required"), "hermes", REASONING_PARSERS["think"])
    call = FORMATS["hermes"].render([GOOD])
    assert check.problem(f"I <tool_call> need {{</think>\n\n{call}") is None
    assert check.problem(call) is not None


def test_what_cannot_be_constrained_is_refused() -> None:
    for form in set(FORMATS) - set(FRAMED):
        with pytest.raises(ApiError, match="tool-parser"):
            constrained_params(use_of("required"), FORMATS[form], None, None)
    with pytest.raises(ApiError, match="structural tag"):
        constrained_params(use_of(), FORMATS["hermes"], None, StructuredOutputsParams(grammar='start: "x"'))
