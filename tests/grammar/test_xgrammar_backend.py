"""The optional backend: refused by name where it is not installed; else its gate, and soundness on the same corpora."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from benchmarks.structured.schema_corpus import byte_vocabulary
from headrace.errors import GrammarError
from headrace.grammar.base import CompiledGrammar, load_backend
from headrace.grammar.constraint_text import prepare
from headrace.structured_outputs import StructuredOutputsParams

IS_INSTALLED = importlib.util.find_spec("xgrammar") is not None
needs_library = pytest.mark.skipif(not IS_INSTALLED, reason="xgrammar is not installed")


def compiled(**params: Any) -> CompiledGrammar:
    wanted = StructuredOutputsParams(backend="xgrammar", **params).to_constraint()
    return load_backend("xgrammar", byte_vocabulary()).compile(prepare(wanted)[0])


def takes(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher.copy()
    return matcher.accept(list(text.encode())) and matcher.is_finished()


@pytest.mark.skipif(IS_INSTALLED, reason="xgrammar is installed")
def test_without_the_library_it_is_refused_by_name() -> None:
    with pytest.raises(GrammarError, match="xgrammar") as caught:
        compiled(regex="a")
    assert caught.value.code == "backend_not_installed" and caught.value.param == "structured_outputs.backend"


@needs_library
def test_texts() -> None:
    assert takes(compiled(choice=["a", "ab"]), "ab") and not takes(compiled(choice=["a", "ab"]), "b")
    assert takes(compiled(regex="a+b"), "aab") and not takes(compiled(regex="a+b"), "a")
    assert takes(compiled(grammar='root ::= "(" root ")" | "x"'), "((x))")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = compiled(json=schema)
    assert takes(grammar, '{"a": 5}') and not takes(grammar, '{"a": "x"}') and not takes(grammar, "{}")
    assert takes(compiled(json=schema, disable_any_whitespace=True), '{"a":5}')
    matcher = grammar.matcher.copy()
    assert matcher.accept(list(b'{"a": 5}')) and matcher.is_complete()
    matcher.rollback(1)
    assert not matcher.is_finished() and matcher.accept(list(b"1}"))
    assert not takes(compiled(json={"type": "object"}), '{"a": 1, "a": 2}')


@needs_library
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "string", "pattern": '^"$'}, "#/pattern"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "#/pattern"),
        ({"type": "number", "maximum": 3}, "#"),
        ({"type": "integer", "multipleOf": 3}, "#/multipleOf"),
        ({"minimum": 3}, "#"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "#/allOf"),
        ({"type": "object", "patternProperties": {"a": {"type": "null"}}}, "#/patternProperties"),
    ],
    ids=str,
)
def test_words_that_it_does_not_enforce_are_refused(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(GrammarError, match=r"xgrammar|whole") as caught:
        compiled(json=schema)
    assert f"schema {path}: " in caught.value.message and caught.value.code == "unsupported_by_backend"
