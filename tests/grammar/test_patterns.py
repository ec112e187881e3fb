"""Patterns of strangers on texts of strangers: right, and in no time, whatever they are."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from headrace.errors import GrammarError
from headrace.grammar.answer_check import AnswerCheck
from headrace.grammar.json_schema import document, lower_schema
from headrace.grammar.json_schema.disjoint import value_key
from headrace.grammar.patterns import matches
from headrace.structured_outputs import StructuredOutputsParams

EVIL = "^(a+)+$"
LONG = "a" * 60 + "!"
HERE = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    ("pattern", "text", "is_match"),
    [
        ("b", "abc", True), ("^b", "abc", False), ("^a.c$", "abc", True), ("^a.c$", "abcd", False), ("c$", "abc", True),
        (r"\d{2}", "x12y", True), ("^$", "", True), ("^$", "x", False), ("", "x", True), ("^.$", "\u00e9", True),
        ("^a\nb$", "a\nb", True), (r"^\S+$", 'say "x" \\ /', False), (r"^\S+$", '"x"\\/', True), ("x", "\t", False),
        (EVIL, "a" * 60, True), (EVIL, LONG, False),
    ],
)  # fmt: skip
def test_matches(pattern: str, text: str, is_match: bool) -> None:
    assert matches(pattern, text) is is_match


def test_what_cannot_be_matched_is_told() -> None:
    for pattern, text in (("(?=a)", "a"), (r"[^\s\S]", "x")):
        with pytest.raises(GrammarError):
            matches(pattern, text)


@pytest.mark.parametrize("char", [*map(chr, range(0x20)), "\x7f", "\u2028", "\U0001f600"], ids=ascii)
def test_every_character_is_matched(char: str) -> None:
    assert matches(r"^a[\s\S]b$", f"a{char}b")
    assert matches("^[^a]$", char) and not matches("a", char) and not matches("00", char)
    assert matches(f"^\\x{{{ord(char):x}}}$", char) and not matches(f"^[^\\x{{{ord(char):x}}}]$", char)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [LONG], "pattern": EVIL},
        {"oneOf": [{"enum": [LONG, "b"]}, {"type": "string", "pattern": EVIL}, {"const": "b"}]},
        {"enum": [{LONG: 1}], "patternProperties": {EVIL: {}}, "additionalProperties": False},
        {"enum": [{LONG: 1}], "properties": {"b": {}}, "patternProperties": {EVIL: {}}, "unevaluatedProperties": False},
        {"enum": [{"x": LONG}], "properties": {"x": {"$schema": HERE, "pattern": EVIL}}},
        {"$schema": HERE, "enum": [{"x": LONG}], "properties": {"x": {"$ref": "#/d/enum/0"}},
         "d": {"enum": [{"$schema": HERE, "pattern": EVIL}]}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "enum": [LONG], "pattern": EVIL},
        {"type": "array", "items": {"enum": [LONG, "b"]}, "contains": {"pattern": EVIL}},
    ],
    ids=str,
)  # fmt: skip
def test_no_schema_keeps_the_lowering_busy(schema: dict[str, Any]) -> None:
    started = time.thread_time()
    with contextlib.suppress(GrammarError):
        lower_schema(schema)
    assert time.thread_time() - started < 2


def test_no_answer_keeps_its_check_busy() -> None:
    check = AnswerCheck(
        StructuredOutputsParams(
            json={"anyOf": [{"pattern": EVIL}, {"pattern": "^a*!$"}], "type": "string"}
        ).to_constraint()
    )
    started = time.thread_time()
    assert check.problem(f'"{LONG}"') is None
    assert check.problem(f'"{LONG}b"') is not None
    assert time.thread_time() - started < 2


def test_long_enums_take_no_time() -> None:
    started = time.thread_time()
    many = [f"value {number}" for number in range(9000)]
    assert lower_schema({"enum": many})[0] == {"enum": many}
    overlapping = [{"enum": list(range(first, first + 40))} for first in range(60)]
    lowered, _ = lower_schema({"oneOf": overlapping})
    assert lowered is not False and time.thread_time() - started < 3


def test_preparing_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_LOWERING_S", 0.0)
    with pytest.raises(GrammarError, match="takes more than 0 s") as caught:
        lower_schema({"type": "object", "properties": {f"a{i}": {"enum": [1, 2]} for i in range(100)}})
    assert caught.value.code == "constraint_too_complex"


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [(1, 1.0, True), (1, True, False), ("1", 1, False), ([1.0], [1], True), ({"a": 2.0}, {"a": 2}, True)],
)  # fmt: skip
def test_values_that_are_equal_in_json(one: Any, other: Any, are_equal: bool) -> None:
    assert (value_key(one) == value_key(other)) is are_equal
