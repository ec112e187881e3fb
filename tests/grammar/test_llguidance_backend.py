from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headrace.errors import GrammarError
from headrace.grammar.base import CompiledGrammar, GrammarMatcher
from headrace.grammar.llguidance_backend import LLGuidanceBackend
from headrace.structured_outputs import StructuredOutputsParams
from tests.grammar.small_vocabulary import END, SPECIAL, TOKENS, bits, encode, small_vocabulary

BACKEND = LLGuidanceBackend(small_vocabulary())


def compiled(**params: Any) -> CompiledGrammar:
    return BACKEND.compile(StructuredOutputsParams(**params).to_constraint())


def allowed(matcher: GrammarMatcher) -> list[int]:
    mask = np.zeros((2, 2), np.uint32)
    matcher.fill_mask(mask, 1)
    assert not mask[0].any()
    return bits(mask[1])


def takes(grammar: CompiledGrammar, text: str) -> bool:
    """True if the whole text satisfies the constraint, one token a time within the masks."""
    matcher = grammar.matcher.copy()
    for token in encode(text):
        if token not in allowed(matcher) or not matcher.accept([token]):
            return False
    return matcher.is_finished()


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"json": {"type": "integer"}}, ["12", "-5", "0"], ["a", "1.2", "", " 1", "01"]),
    ({"json": {"enum": ["ab", 1]}}, ['"ab"', "1"], ['"a"', "12", "ab"]),
    ({"json": {"items": {"type": "null"}, "type": "array"}}, ["[]", "[null, null]", "[\n null\n]"], ["[1]", "[  nul"]),
    ({"json": {"type": "array", "maxItems": 2}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
    ({"json": True}, ["null", "[]", '{"a": 1}'], ["", "nul", "a"]),
    ({"json_object": True}, ["{}", '{"a":{"b":[1]}}'], ["[]", "1", '{"a"}']),
    ({"regex": "a(b|c)*"}, ["a", "abcb"], ["", "b", "ad"]),
    ({"regex": "^[a-c]{2}$"}, ["ab"], ["a", "abc"]),
    ({"regex": "(a*)*b"}, ["aaaab", "b"], ["aaaa"]),
    ({"choice": ["a", "ab", "abc"]}, ["a", "ab", "abc"], ["b", "abcc", ""]),
    ({"choice": ['"a', "é"]}, ['"a', "é"], ["a"]),
    ({"grammar": 'start: "a" start "b" | "c"'}, ["c", "acb", "aacbb"], ["ac", "b"]),
    ({"grammar": '?start: item+\nitem: "a" -> x\n  | "b"\n'}, ["ab", "b"], ["c", ""]),
    ({"grammar": 'start: /ab?|[<]\\/<c>/ "1" | A // <[5]>\n# <s>\nA: "<s>\\"<b>"'}, ["ab1"], ["1"]),
    ({"grammar": 'root ::= item{2,3}\nitem ::= [a-b]\n  | "1" '}, ["ab", "1a1"], ["a", "abab"]),
    (
        {"structural_tag": {"structures": [{"begin": "[a]", "schema": {"enum": [1]}, "end": "[b]"}], "triggers": ["[a"]}},  # noqa: E501
        ["", "ab", "[a]1[b]", "a [a]1[b] c", "[a]1[b][a]1[b]", "[ a"],
        ["[a]2[b]", "[ab", "[a]1", "[a]1[c"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("params", "good", "bad"), CASES, ids=lambda value: str(value)[:50])
def test_texts(params: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = compiled(**params)
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


def test_the_first_mask_comes_with_the_grammar_and_end_tokens_where_the_text_may_end() -> None:
    grammar = compiled(choice=["a", "ab"])
    assert [TOKENS[token] for token in bits(grammar.first_mask)] == [b"a", b"ab"]
    matcher = grammar.matcher.copy()
    assert not matcher.is_finished() and matcher.accept(encode("a"))
    assert matcher.is_finished() and not matcher.is_complete()
    assert sorted(allowed(matcher)) == sorted([*encode("b"), END])
    assert matcher.accept(encode("b")) and matcher.is_complete()


def test_no_special_token_is_ever_allowed() -> None:
    matcher = compiled(regex=r"(.|\n)*").matcher.copy()
    assert SPECIAL not in allowed(matcher) and END in allowed(matcher)


def test_every_end_token_of_a_model_is_allowed_and_none_where_it_has_none() -> None:
    constraint = StructuredOutputsParams(regex="a*").to_constraint()
    both = LLGuidanceBackend(small_vocabulary((SPECIAL, END))).compile(constraint).matcher.copy()
    assert {SPECIAL, END} <= set(allowed(both))
    none = LLGuidanceBackend(small_vocabulary(())).compile(constraint).matcher.copy()
    assert not {SPECIAL, END} & set(allowed(none)) and none.is_finished()


def test_forced_tokens_are_the_tokenizers_spelling() -> None:
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "boolean"}},
        "required": ["ab"],
        "additionalProperties": False,
    }
    matcher = compiled(json=schema, disable_any_whitespace=True).matcher.copy()
    forced = matcher.forced_tokens()
    assert (
        b"".join(TOKENS[token] for token in forced).decode()
        == '{"ab":'[: len(b"".join(TOKENS[t] for t in forced))]
    )
    assert forced == encode('{"ab":')[: len(forced)] and len(forced) >= 2
    assert matcher.accept(forced)


def test_copies_are_independent_and_rollback_undoes() -> None:
    matcher = compiled(regex="(ab|cd)+").matcher.copy()
    first = allowed(matcher)
    assert matcher.accept(encode("a"))
    other = matcher.copy()
    assert other.accept(encode("b")) and other.is_finished() and not matcher.is_finished()
    matcher.rollback(1)
    assert allowed(matcher) == first
    assert not matcher.accept(encode("b"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a(?=b)"}, "regex"),
    ({"regex": "[a-"}, "regex"),
    ({"grammar": 'start: "a" foo'}, "grammar"),
    ({"grammar": 'start: start "a"'}, "accepts no text"),
    ({"grammar": "hello"}, "grammar"),
    ({"grammar": "root ::= foo"}, "foo"),
    ({"grammar": 'rule ::= "a"'}, "root"),
    ({"grammar": 'start: "a"\n | <[5]>'}, r"line 2: '<\[5\]>' refers to tokens"),
    ({"grammar": 'start: "<a>" /<b>/ <[^1-3,7]> // <c>'}, r"<\[\^1-3,7\]>"),
    ({"grammar": "start: A <|end|>\nA: /a[b]/"}, r"<\|end\|>"),
    ({"grammar": 'start: <s> "a"'}, "<s>"),
    ({"json": False}, "accepts nothing"),
    ({"json": {"type": "string", "pattern": "([a-z"}}, "pattern|regex"),
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
    ({"structural_tag": {"structures": []}}, "structures"),
    ({"structural_tag": {"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<b"]}}, "<b"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "x"}}}, "format.type"),
    ({"structural_tag": {"format": {"type": "or", "elements": [{"type": "regex"}]}}}, r"elements\[0\].pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_done_is_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiled(**params)


def tag(form: dict[str, Any]) -> CompiledGrammar:
    return compiled(structural_tag=json.dumps({"type": "structural_tag", "format": form}))


def test_nested_structural_tags() -> None:
    number = {"type": "json_schema", "json_schema": {"type": "integer"}}
    call = {"type": "tag", "begin": "[a]", "content": number, "end": "[b]"}
    one = {"at_least_one": True, "stop_after_first": True}
    grammar = tag({"type": "triggered_tags", "triggers": ["[a"], "tags": [call], **one})
    assert takes(grammar, "ab [a]12[b]")
    assert not takes(grammar, "ab") and not takes(grammar, "[a]12[b] a")
    grammar = tag({"type": "tags_with_separator", "tags": [call], "separator": ",", "at_least_one": True})
    assert takes(grammar, "[a]1[b]") and takes(grammar, "[a]1[b],[a]2[b]")
    assert not takes(grammar, "") and not takes(grammar, "[a]1[b],")


def test_a_special_token_that_is_written_out_in_a_tag_is_that_token() -> None:
    text = {"type": "tag", "begin": "<s>", "content": {"type": "any_text"}, "end": "[e]"}
    last = [{"type": "regex", "pattern": "a/b"}, {"type": "const_string", "value": "1"}]
    grammar = tag({"type": "sequence", "elements": [text, {"type": "or", "elements": last}]})
    matcher = grammar.matcher.copy()
    assert bits(grammar.first_mask) == [SPECIAL]
    assert matcher.accept([SPECIAL, *encode("a b[e]")]) and not matcher.is_finished()
    assert matcher.accept(encode("1")) and matcher.is_complete()
