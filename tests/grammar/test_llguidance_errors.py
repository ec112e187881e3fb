"""Why a grammar does not compile: one line, with the reason and where it can be the place in the user's text."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import GrammarError
from headrace.grammar.answer_check import AnswerCheck
from headrace.grammar.base import TokenVocabulary, load_backend
from headrace.structured_outputs import StructuredOutputsParams

BYTES = TokenVocabulary(
    [bytes([b]) for b in range(256)] + [b""], frozenset({256}), (256,), lambda t: list(t.encode())
)
TAG = {"begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a>"], "tags": [TAG]}
PART = {"begin": "<a>", "schema": {}, "end": "</a>"}
SHORT = {"structures": [PART], "triggers": ["<a>"]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "ab[c"}, "at character 3: unclosed character class"),
        ({"regex": "a\n(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "at character 4: backreferences are not supported"),
        ({"regex": r"\bfoo"}, "word boundaries"),
        ({"grammar": "start: x\nx: foo"}, 'line 2, column 4: unknown name: "foo"'),
        ({"grammar": "start: x\nx: /a(/"}, "line 2, column 4: the regex 'a(', at character 2: unclosed group"),
        ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
        ({"json": {"properties": {"a": {"pattern": "(?=a)"}}}}, "#/properties/a/pattern: the regex '(?=a)'"),
        ({"structural_tag": {"format": {"type": "regex", "pattern": "["}}}, "the regex '[', at character 1: unclosed"),
    ],
    ids=str,
)  # fmt: skip
def test_reasons(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        load_backend("llguidance", BYTES).compile(StructuredOutputsParams(**fields).to_constraint())
    assert words in caught.value.message and "\n" not in caught.value.message
    assert "(in regex)" not in caught.value.message


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({"format": TRIGGERED, "x": 1}, "$ has no field 'x'"),
        ({"format": {**TRIGGERED, "excludes": []}}, "$.format has no field 'excludes'"),
        ({"format": {**TRIGGERED, "tags": [{**TAG, "x": 1}]}}, "$.format.tags[0] has no field 'x'"),
        ({"format": {**TRIGGERED, "at_least_one": "yes"}}, "$.format.at_least_one must be true or false"),
        ({"format": {"type": "any_text", "excludes": ["x"]}}, "$.format has no field 'excludes'"),
        ({"format": {"type": "const_string", "value": "a", "x": None}}, "$.format has no field 'x'"),
        ({**SHORT, "x": 1}, "$ has no field 'x'"),
        ({**SHORT, "structures": [{**PART, "strict": True}]}, "$.structures[0] has no field 'strict'"),
        ({**SHORT, "structures": ["x"]}, "$.structures[0] must be an object"),
    ],
    ids=str,
)  # fmt: skip
def test_structural_tags_with_fields_that_nobody_reads(tag: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        load_backend("llguidance", BYTES).compile(StructuredOutputsParams(structural_tag=tag).to_constraint())
    assert words in caught.value.message


def test_where_an_answer_may_end() -> None:
    finder = AnswerCheck(StructuredOutputsParams(regex="(ab)+c?").to_constraint()).end_finder()
    text = "ababc"
    wanted = {2, 4, 5}
    for length in [1, 2, 3, 5, 4, 0, 2, 5, 1, 4]:  # beginnings, longer and shorter
        assert finder.is_whole(text[:length]) is (length in wanted), length
    assert not finder.is_whole("ababx") and not finder.is_whole("ab")  # it has left the grammar
