"""What each format reads out of its texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serve.tools.events import CallStart, ParsedAnswer
from headrace.serve.tools.registry import FORMATS, format_of_template
from headrace.serve.tools.tool_parser import CallRules
from tests.serve.tools.answers import TEXTS, answer, ids, reader


def calls_of(parsed: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls if call.is_complete]


EXPECTED: dict[str, list[tuple[str, list[tuple[str, Any]], list[str]]]] = {
    "hermes": [
        (
            "Let me look.\n\nDone <b>.",
            [("get_weather", {"city": 'Par"is', "n": [1, -2500]}), ("get_time", {"zone": None})],
            [],
        ),
        ("", [("f", {"x": "é😀", "y": {}})], []),
        (' \n <tool_call>\n{"name": "no", "arguments": {}}</tool_call>', [("f", {})], ["unknown_tool"]),
        ("", [("f", {"text": "two\nlines\tand <tool_call> inside"})], []),
    ],
    "llama3_json": [
        ("", [("get_weather", {"city": "Paris", "d": {"e": [True, False, None]}}), ("get_time", {})], []),
        ("Hm. ", [("f", {"x": "1"})], []),
        ('{"answer": [1, 2]} is JSON, not a call', [], []),
        ("then words", [("f", {})], []),
    ],
    "mistral": [
        ("Sure. after", [("get_weather", {"city": "Rome"}), ("get_time", {"a": ["]", "}"]})], []),
        ("", [("get_weather", {"city": "Oslo"}), ("get_time", {"zone": "UTC"})], []),
        ("", [("f", {"deep": {"er": {"est": [[[]]]}}})], []),
    ],
    "deepseek": [
        ("I'll check.", [("get_weather", {"city": "Tokyo", "s": "```"}), ("get_time", {})], []),
        (" bye", [("f", {"x": 1}), ("f", {"x": "é"})], []),
    ],
    "gemma": [
        (
            "",
            [("get_weather", {"city": "São Paulo, {x}", "days": [1, 2.5], "ok": True}), ("get_time", {})],
            [],
        ),
        ("Wait:  end", [("f", {"a": 'q"uo\\te\n', "b": {"c": None, "d": ["x"]}})], []),
    ],
    "pythonic": [
        (
            "",
            [
                ("get_weather", {"city": "Par'is", "n": [1, [2, 0.5]], "flag": True}),
                ("get_time", {"zone": None, "d": {"a": "b\n", "c": -1}}),
            ],
            [],
        ),
        ("", [("f", {"x": 1.0}), ("ns.tool-2", {})], []),
        ("[1, 2, f(x)] is a list", [], []),
        ("[f(text='''')]", [], ["invalid_syntax"]),
    ],
    "tool_code": [
        ("I will.\n\nthen more", [("get_weather", {"city": "Rome"}), ("get_time", {"zone": "éA"})], []),
        ("", [("f", {"x": 1}), ("f", {"x": []})], []),
    ],
}
CASES = [
    (form, text, *expected)
    for form, texts in TEXTS.items()
    for text, expected in zip(texts, EXPECTED[form], strict=True)
]


@pytest.mark.parametrize(("form", "text", "content", "calls", "failures"), CASES)
def test_what_is_read(form: str, text: str, content: str, calls: list[Any], failures: list[str]) -> None:
    parsed = answer(reader(form)([text]))
    assert parsed.content == content
    assert calls_of(parsed) == calls
    assert [failure.code for failure in parsed.failures] == failures


NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,20}", fullmatch=True).filter(lambda name: name != "print")
KEY = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
)
ARGUMENTS = st.dictionaries(
    KEY,
    st.recursive(
        SCALAR,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(FORMATS)), st.lists(st.tuples(NAME, ARGUMENTS), min_size=1, max_size=3), st.data()
)
def test_what_a_format_writes_it_reads(
    form: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    text = FORMATS[form].render(calls)
    cut = data.draw(st.integers(0, len(text)))
    parser = FORMATS[form].parser(CallRules([name for name, _ in calls], ids()))
    parsed = ParsedAnswer()
    for piece in (text[:cut], text[cut:]):
        parsed.add(parser.feed(piece))
    parsed.add(parser.finish(is_cut=False))
    assert calls_of(parsed) == calls
    assert not parsed.failures and not parsed.content.strip()


def test_arguments_come_as_they_are_written() -> None:
    """A long string is not held back until its end."""
    parser = FORMATS["hermes"].parser(CallRules(["f"], ids()))
    parsed = ParsedAnswer()
    parsed.add(parser.feed('<tool_call>{"name": "f", "arguments": {"text": "once upon'))
    assert parsed.calls[0].arguments == '{"text": "once upon' and not parsed.calls[0].is_complete
    parsed.add(parser.feed(" a time"))
    assert parsed.calls[0].arguments.endswith("a time")


def test_name_is_told_once_and_first() -> None:
    events = reader("hermes")(list('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>'))
    assert events[0] == CallStart(0, "id0", "f")
    assert sum(isinstance(event, CallStart) for event in events) == 1


def test_no_more_calls_than_allowed() -> None:
    for form, texts in TEXTS.items():
        parsed = answer(reader(form, max_calls=1)([texts[0]]))
        assert len(parsed.calls) == 1 and parsed.calls[0].is_complete and not parsed.failures, form


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('<tool_call>{"name": "f", "arguments": {"x": 01}}</tool_call>', "invalid_syntax"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "invalid_syntax"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "invalid_syntax"),
        ('<tool_call>{"name": "f", "arguments": {"x": 1,}}</tool_call>', "invalid_syntax"),
        ("<tool_call>{'name': 'f'}</tool_call>", "invalid_syntax"),
        ('<tool_call>{"arguments": {}}</tool_call>', "invalid_syntax"),
        ('<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>', "invalid_syntax"),
        ("<tool_call></tool_call>", "invalid_syntax"),
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', "unknown_tool"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "unknown_tool"),
        ('<tool_call>{"name": "f", "arguments": {"x": "', "unfinished"),
        ('<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 100, "invalid_syntax"),
    ],
)
def test_a_failure_is_told_and_its_text_given(text: str, code: str) -> None:
    parsed = answer(reader("hermes")([text]))
    assert [failure.code for failure in parsed.failures] == [code]
    assert parsed.content == text
    assert not calls_of(parsed)


def test_what_is_wrong_behind_whole_arguments_leaves_the_call() -> None:
    parsed = answer(reader("hermes")(['<tool_call>{"name": "f", "arguments": "{} 1"}</tool_call>']))
    assert calls_of(parsed) == [("f", {})]
    assert parsed.content == ' 1"}</tool_call>' and len(parsed.failures) == 1


def test_a_sound_call_stands_beside_a_broken_one() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{]</tool_call>'
    parsed = answer(reader("hermes")([text]))
    assert calls_of(parsed) == [("f", {})]
    assert parsed.content == "<tool_call>{]</tool_call>" and len(parsed.failures) == 1


def test_a_cut_call_is_no_failure() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "ab'
    parsed = answer(reader("hermes", is_cut=True)([text]))
    assert not parsed.failures and parsed.content == "" and parsed.calls[0].arguments == '{"x": "ab'
    nameless = answer(reader("hermes", is_cut=True)(['<tool_call>{"na']))
    assert nameless.content == '<tool_call>{"na' and not nameless.failures


def test_a_surrogate_inside_a_string_of_arguments_stays_escaped() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\ud800\\"}"}</tool_call>'
    (call,) = answer(reader("hermes")([text])).calls
    call.arguments.encode()
    assert json.loads(call.arguments) == {"x": "\ud800"}


def test_mistral_ids_are_what_its_templates_take() -> None:
    call_id = FORMATS["mistral"].new_call_id()
    assert len(call_id) == 9 and call_id.isalnum()
    assert FORMATS["hermes"].new_call_id().startswith("call_")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if tools %}… <tool_call></tool_call>", "hermes"),
        ("{{ '<|python_tag|>' }} Respond in the format", "llama3_json"),
        ('[{"type": "function"}][/AVAILABLE_TOOLS] [TOOL_CALLS]', "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<start_function_call>call:", "gemma"),
        ("you SHOULD put it in the format of [func_name1(params_name1=params_value1", "pythonic"),
        ("```tool_code", "tool_code"),
    ],
)
def test_formats_are_found_in_templates(source: str, name: str) -> None:
    form = format_of_template(source)
    assert form is not None and form.name == name
    assert format_of_template("{{ messages }}") is None
