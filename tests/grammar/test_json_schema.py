"""Schemas through lowering and compiling, judged by the values that their grammars accept."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks.structured.bench_schemas import run
from benchmarks.structured.schema_corpus import accepts, bench_cases, byte_vocabulary, suite_cases
from headrace.errors import GrammarError
from headrace.grammar.base import CompiledGrammar, load_backend
from headrace.grammar.constraint_text import prepare
from headrace.grammar.json_schema import lower_schema
from headrace.structured_outputs import StructuredOutputsParams

CASES_FOLDER = Path(__file__).parents[2] / "shared" / "cases"
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 5, 10, -1, 1.5, 2.5, "", "a", "b", "ab", "abc", "none", [], [1], [1, 2], [1, 1],
    ["a"], ["a", "b"], [[1]], {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": "a"}, {"a": 1, "c": 2},
    {"a": 2, "b": "b"}, {"a": {"a": 1}}, {"a": 1, "b": 1, "c": 1}, [True, False], [0, 1, 2],
]  # fmt: skip
EXACT: list[Any] = [
    True, {}, {"type": "integer"}, {"type": ["integer", "null"]}, {"minimum": 2}, {"maxLength": 1},
    {"enum": [1, "a", None, {"a": 1}]}, {"enum": [1, 2, 3], "minimum": 2}, {"const": [1, 2]},
    {"enum": ["a", "b"], "not": {"const": "b"}},
    {"not": {"type": "string"}}, {"not": {"const": "a"}}, {"not": {"enum": ["a", "ab"]}}, {"not": {"enum": [1, 2]}},
    {"not": {"required": ["a"]}}, {"type": "object", "not": {"required": ["a", "b"]}}, {"not": {"maxLength": 1}},
    {"not": {"not": {"pattern": "^a"}}}, {"not": {"const": {"a": 1}}}, {"not": {"const": [1]}},
    {"not": {"minItems": 1}}, {"not": {"anyOf": [{"type": "string"}, {"minimum": 2}]}}, {"not": {"const": True}},
    {"not": {"properties": {"a": {"const": 1}}}}, {"not": {"prefixItems": [{"const": 1}]}}, {"not": {"const": None}},
    {"oneOf": [{"type": "string"}, {"minLength": 2}]}, {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "array", "items": {"type": "string"}}]},
    {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"maxProperties": 1}]},
    {"oneOf": [{"const": 1}, {"enum": [1, 2]}, {"const": "a"}]},
    {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
    {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"maximum": 2}},
    {"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"], "b": {"required": ["a"]}}},
    {"items": {"enum": [1, 2, "a"]}, "uniqueItems": True, "type": "array"},
    {"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    {"items": {"type": "integer", "minimum": 0, "maximum": 3}, "uniqueItems": True, "maxItems": 2},
    {"properties": {"a": {}, "b": {}}, "minProperties": 1, "type": "object"},
    {"properties": {"a": {}, "b": {}}, "maxProperties": 1, "type": "object"},
    {"properties": {"a": {}}, "minProperties": 2, "type": "object"},
    {"propertyNames": {"enum": ["a", "b"]}}, {"propertyNames": {"pattern": "^a"}}, {"propertyNames": {"maxLength": 0}},
    {"allOf": [{"minimum": 1}, {"maximum": 2}]}, {"allOf": [{"properties": {"a": {"const": 1}}}, {"required": ["a"]}]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}, {"$ref": "#/$defs/x", "minimum": 2, "$defs": {"x": {"type": "integer"}}},  # noqa: E501
    {"$defs": {"x": {"$anchor": "here", "type": "string"}}, "$ref": "#here"},
    {"$id": "http://x.org/a", "$ref": "b", "$defs": {"b": {"$id": "b", "type": "null"}}},
    {"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"const": "a"}}},
    {"type": "array", "items": {"$ref": "#/$defs/t"}, "$defs": {"t": {"anyOf": [{"type": "integer"}, {"$ref": "#"}]}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"const": "a"}], "additionalItems": False},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/x", "minimum": 5, "definitions": {"x": {"type": "integer"}}},  # noqa: E501
    {"minLength": 1.0, "maxItems": 2.0},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 2, "exclusiveMinimum": True},
    {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, {"contains": {}, "type": "array"},
    {"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
    {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False},
]  # fmt: skip


@cache
def backend() -> Any:
    return load_backend("llguidance", byte_vocabulary())


def compiled(schema: Any) -> CompiledGrammar:
    return backend().compile(prepare(StructuredOutputsParams(json=schema).to_constraint())[0])


@pytest.mark.parametrize("schema", EXACT, ids=lambda schema: str(schema)[:60])
def test_a_grammar_accepts_what_the_schema_accepts(schema: Any) -> None:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    grammar = compiled(schema)
    for value in VALUES:
        assert accepts(grammar, value, schema) is kind(schema).is_valid(value), value


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def optional(count: int, name: str = "p") -> dict[str, Any]:
    return {"type": "object", "properties": {f"{name}{i}": {"type": "integer"} for i in range(count)}}


REFUSED: list[tuple[Any, str, str]] = [
    ({"$ref": "https://example.com/x"}, "#/$ref", "leaves the schema"),
    ({"$ref": "#/$defs/no"}, "#/$ref", "points at nothing"),
    ({"$ref": "#no"}, "#/$ref", "no anchor"),
    ({"$ref": "#"}, "#", "accepts nothing"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#", "accepts nothing"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#", "accepts nothing"),
    ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "#/anyOf/0/$ref", "leads back to itself"),
    ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": [{"oneOf": [{"$ref": "#/$defs/b"}]}, {"const": 1}]},
      "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "#/$defs/b/allOf/0/$ref", "leads back to itself"),
    ({"anyOf": [True, {"$ref": "#"}]}, "#/anyOf/1/$ref", "leads back to itself"),
    ({"dependentSchemas": {"a": {"$ref": "#"}}}, "#/dependentSchemas/a/$ref", "leads back to itself"),
    ({"if": {"type": "null"}, "else": {"$ref": "#"}}, "#/else/$ref", "leads back to itself"),
    ({"allOf": [{"const": 1}, {"const": 2}]}, "", "nsatisfiable|nothing"),
    ({"enum": [1, 2], "minimum": 3}, "#", "accepts nothing"),
    ({"type": "strin"}, "#/type", "malformed"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "#/properties/a/uniqueItems", "only supported"),
    ({"properties": {"a/b": {"contains": {"type": "null"}}}}, "#/properties/a~1b/contains", "not supported"),
    ({"not": {"pattern": "a"}}, "#/not/pattern", "cannot be negated"),
    ({"not": {"multipleOf": 2}}, "#/not/multipleOf", "cannot be negated"),
    ({"$dynamicRef": "#a", "$dynamicAnchor": "a"}, "#/$dynamicRef", "dynamic"),
    (deep(200), "#", "nested|levels"),
    ({"items": optional(1001)}, "#/items/properties", "more than 1000 optional"),
    ({"anyOf": [optional(600, name) for name in "ab"]}, "#", "row has .* at most 1000"),
    ({"allOf": [optional(600, name) for name in "ab"]}, "#", "row has .* at most 1000"),
    ({"items": {"enum": list(range(30))}, "uniqueItems": True}, "#/uniqueItems", "arrangements"),
    ({"minimum": "5"}, "#/minimum", "malformed"),
    ({"properties": {"a": {"type": "string", "pattern": "a(?=b)"}}}, "#/properties/a/pattern", "regex"),
    ({"patternProperties": {"^a": {}, "b": {"type": "null"}}}, "#", "disjoint"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_no_grammar_can_do_is_refused_with_its_path(schema: Any, path: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        compiled(schema)
    assert f"schema {path}: " in caught.value.message or not path
    assert caught.value.code and len(caught.value.message) < 1000


def test_formats_that_nobody_checks_are_noted() -> None:
    schema = {"properties": {"a": {"format": "color"}, "b": {"format": "date"}}, "title": "x", "x-own": 1}
    lowered, notes = lower_schema(schema)
    assert "color" not in str(lowered) and len(notes) == 2
    assert any("#/properties/a/format" in note for note in notes) and any("#/x-own" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1999-12-31"],
            ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31"],
        ),
        (
            "time",
            ["12:30:00Z", "23:59:60Z", "00:00:00.5+01:30"],
            ["24:00:00Z", "12:30:60Z", "12h30", "12:30:00"],
        ),
        ("date-time", ["2024-02-29T12:30:00Z"], ["2024-02-30T12:30:00Z", "2024-02-29 12:30:00Z"]),
        ("hostname", ["a", "a-b.example.com", "x" * 63], ["-a", "a-", "x" * 64, "a..b", ""]),
        ("email", ["ada@example.com"], ["ada", "@", "a@"]),
        ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08"]),
        ("ipv4", ["127.0.0.1"], ["127.0.0.256", "1.2.3"]),
    ],
)
def test_formats(name: str, good: list[str], bad: list[str]) -> None:
    grammar = compiled({"type": "string", "format": name})
    assert all(accepts(grammar, text, {}) for text in good)
    assert not any(accepts(grammar, text, {}) for text in bad)


def test_a_large_enum_compiles() -> None:
    texts = [f"{number:x}" * 4 for number in range(6000)]
    grammar = compiled({"enum": texts})
    assert accepts(grammar, texts[-1], {}) and not accepts(grammar, "none", {})


@pytest.mark.parametrize("is_closed", [False, True])
def test_the_last_of_a_thousand_optional_properties(is_closed: bool) -> None:
    matcher = compiled({**optional(1000), "additionalProperties": not is_closed}).matcher.copy()
    assert matcher.accept(list(b'{"p0": 1, "p999": 2}')) and matcher.is_finished()


@pytest.mark.skipif(not CASES_FOLDER.exists(), reason="no case data beside this checkout")
def test_the_official_suite() -> None:
    tally = run(suite_cases(CASES_FOLDER / "json_schema_test_suite/tests/draft2020-12"), "llguidance", False)[
        "all"
    ]
    assert tally.num_invalid_accepted == 0 and tally.num_compiled >= 260
    # What is left: formats are enforced here, and an annotation there.
    assert tally.num_valid_accepted >= 0.97 * tally.num_valid


@pytest.mark.slow
@pytest.mark.skipif(not CASES_FOLDER.exists(), reason="no case data beside this checkout")
def test_public_schemas() -> None:
    tally = run(bench_cases(CASES_FOLDER / "jsonschemabench/sample.jsonl"), "llguidance", False)["all"]
    assert tally.num_invalid_accepted == 0 and tally.num_compiled >= 0.95 * tally.num_schemas
    assert tally.num_valid_accepted >= 0.98 * tally.num_valid


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": 4}, {"$schema": ["a"]}, {"$schema": {}}, {"properties": {"a": {"$schema": [4]}}},
        {"$id": "http://a/b", "$ref": "http://[q]/"}, {"$id": "http://a/b", "properties": {"x": {"$id": "http://[x"}}},
        {"$ref": "#/properties/x", "properties": {"x": {"$id": "http://[x"}}},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_addresses_are_the_schema_s_fault(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        lower_schema(schema)


def test_a_library_s_failure_is_the_schema_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AttributeError("odd")

    monkeypatch.setattr("headrace.grammar.json_schema.without_endless", fail)
    with pytest.raises(GrammarError, match="cannot be prepared") as caught:
        lower_schema({"type": "object"})
    assert caught.value.code == "constraint_not_compiled"


def test_patterns_are_in_the_library_s_words() -> None:
    """Python's re knows neither."""
    for pattern, text in ((r"^\p{L}{2}$", "ab"), (r"^\x{41}$", "A")):
        constraint, _ = prepare(
            StructuredOutputsParams(json={"type": "string", "pattern": pattern}).to_constraint()
        )
        grammar = load_backend("llguidance", byte_vocabulary()).compile(constraint)
        assert accepts(grammar, text, {}) and not accepts(grammar, "1", {})
