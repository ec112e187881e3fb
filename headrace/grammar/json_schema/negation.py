"""Negations of single words: what violates one keyword, as a schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.grammar.json_schema.disjoint import ALL_TYPES, type_name
from headrace.grammar.json_schema.formats import FORMATS
from headrace.grammar.json_schema.logic import all_of, any_of
from headrace.grammar.json_schema.string_sets import none_of

if TYPE_CHECKING:
    from headrace.grammar.json_schema.lowering import SchemaLowering

Negation = Callable[["SchemaLowering", dict[str, Any], str, str], Any]


def negate_word(lowering: SchemaLowering, word: str, schema: dict[str, Any], base: str, path: str) -> Any:
    """What violates one word of a schema. Raises GrammarError for one that cannot be negated."""
    negation = _NEGATIONS.get(word)
    if negation is not None:
        return negation(lowering, schema, base, path)
    if word in _STUBBORN:
        return lowering.give_up(
            f"{path}/{word}", "cannot be negated: say what is wanted rather than what is not"
        )
    return False  # a word that says nothing is never violated


def not_value(value: Any) -> Any:
    """Everything but one value."""
    kind = type_name(value)
    others = {"type": sorted(ALL_TYPES - {kind})}
    if kind == "null":
        return others
    if kind == "boolean":
        return any_of([others, {"const": not value}])
    if kind == "string":
        return any_of([others, {"type": "string", "pattern": none_of([value])}])
    if kind == "number":
        parts = ({"type": "number", "exclusiveMaximum": value}, {"type": "number", "exclusiveMinimum": value})
        return any_of([others, *parts])
    if kind == "array":
        return any_of([others, *_other_arrays(value)])
    return any_of([others, *_other_objects(value)])


def _other_arrays(value: list[Any]) -> list[Any]:
    parts: list[Any] = [{"type": "array", "minItems": len(value) + 1}]
    if value:
        parts.append({"type": "array", "maxItems": len(value) - 1})
    for index, item in enumerate(value):
        prefix = [*([True] * index), not_value(item)]
        parts.append({"type": "array", "minItems": index + 1, "prefixItems": prefix})
    return parts


def _other_objects(value: dict[str, Any]) -> list[Any]:
    parts: list[Any] = [{"type": "object", "minProperties": len(value) + 1}]
    for name, item in value.items():
        parts.append({"type": "object", "properties": {name: False}})
        parts.append({"type": "object", "properties": {name: not_value(item)}, "required": [name]})
    return parts


def _values(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    """Strings at once, since a pattern has room for many; numbers by the gaps between them."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    texts = sorted({value for value in values if isinstance(value, str)})
    rest = {json.dumps(value, sort_keys=True): value for value in values if not isinstance(value, str)}
    others = sorted(ALL_TYPES - {"string"})
    parts = [not_value(value) for value in rest.values()]
    if texts:
        parts.append(any_of([{"type": others}, {"type": "string", "pattern": none_of(texts)}]))
    return all_of(parts)


def _type(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    # Numbers that are not whole have no schema of their own; without them the rest is still right.
    taken = {"number" if name == "integer" else name for name in names}
    left = sorted(ALL_TYPES - taken)
    return {"type": left} if left else False


def _bound(word: str, kind: str, opposite: str, shift: int) -> Negation:
    def negation(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
        limit = schema[word]
        if isinstance(limit, bool):
            return False  # draft 4: told with the bound itself
        if shift and limit + shift < 0:
            return False
        return {"type": kind, opposite: limit + shift}

    return negation


def _inclusive(word: str, opposite: str) -> Negation:
    """In draft 4 a flag beside a bound makes it exclusive."""

    def negation(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
        is_exclusive = schema.get(f"exclusive{word.capitalize()}") is True
        return {
            "type": "number",
            opposite if is_exclusive else f"exclusive{opposite.capitalize()}": schema[word],
        }

    return negation


def _required(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    return any_of([{"type": "object", "properties": {name: False}} for name in schema["required"]])


def _properties(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    parts = []
    for name, item in schema["properties"].items():
        wrong = lowering.negative(item, base, f"{path}/properties/{name}")
        if wrong is not False:
            parts.append({"type": "object", "properties": {name: wrong}, "required": [name]})
    return any_of(parts)


def _prefix(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    parts = []
    for index, item in enumerate(schema["prefixItems"]):
        wrong = lowering.negative(item, base, f"{path}/prefixItems/{index}")
        if wrong is not False:
            prefix = [*([True] * index), wrong]
            parts.append({"type": "array", "minItems": index + 1, "prefixItems": prefix})
    return any_of(parts)


def _items(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    items = schema["items"]
    if items is True or items == {}:
        return False
    if items is False:
        return {"type": "array", "minItems": len(schema.get("prefixItems", ())) + 1}
    return lowering.give_up(
        f"{path}/items", "cannot be negated: an array with some wrong item has no grammar"
    )


def _contains(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    if schema.get("minContains", 1) != 1 or "maxContains" in schema:
        return lowering.give_up(f"{path}/contains", "cannot be negated with counts")
    return {"type": "array", "items": lowering.negative(schema["contains"], base, f"{path}/contains")}


def _pattern_properties(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    if all(item is True or item == {} for item in schema["patternProperties"].values()):
        return False
    return lowering.give_up(f"{path}/patternProperties", "cannot be negated: say which properties are wanted")


def _additional(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    if schema["additionalProperties"] is True or schema["additionalProperties"] == {}:
        return False
    if (
        schema["additionalProperties"] is False
        and not schema.get("patternProperties")
        and lowering.may_narrow
    ):
        lowering.give_up(f"{path}/additionalProperties", "")
        listed = dict.fromkeys(schema.get("properties", {}), False)
        return (
            {"type": "object", "properties": listed, "minProperties": 1} if listed else {"minProperties": 1}
        )
    return lowering.give_up(
        f"{path}/additionalProperties", "cannot be negated: say which properties are wanted"
    )


def _all_of(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    return any_of([lowering.negative(s, base, f"{path}/allOf/{i}") for i, s in enumerate(schema["allOf"])])


def _any_of(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    return all_of([lowering.negative(s, base, f"{path}/anyOf/{i}") for i, s in enumerate(schema["anyOf"])])


def _one_of(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    branches = schema["oneOf"]
    none = all_of([lowering.negative(s, base, f"{path}/oneOf/{i}") for i, s in enumerate(branches)])
    return any_of([none, lowering.at_least_two(branches, base, f"{path}/oneOf")])


def _not(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    return lowering.positive(schema["not"], base, f"{path}/not")


def _if(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    parts = []
    for word, take in (("then", lowering.positive), ("else", lowering.negative)):
        wrong = lowering.negative(schema.get(word, True), base, f"{path}/{word}")
        parts.append(all_of([take(schema["if"], base, f"{path}/if"), wrong]) if wrong is not False else False)
    return any_of(parts)


def _dependent(word: str) -> Negation:
    def negation(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
        parts = []
        for name, needed in schema[word].items():
            rule = {"required": needed} if isinstance(needed, list) else needed
            wrong = lowering.negative(rule, base, f"{path}/{word}/{name}")
            parts.append(all_of([{"type": "object", "required": [name]}, wrong]))
        return any_of(parts)

    return negation


def _format(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    if schema["format"] in FORMATS:
        return lowering.give_up(f"{path}/format", "cannot be negated")
    return False


_STUBBORN = frozenset(
    {
        *("pattern", "multipleOf", "uniqueItems", "propertyNames", "additionalItems", "$dynamicRef"),
        *("unevaluatedProperties", "unevaluatedItems", "$recursiveRef"),
    }
)
_NEGATIONS: dict[str, Negation] = {
    "const": _values,
    "enum": _values,
    "type": _type,
    "minimum": _inclusive("minimum", "maximum"),
    "maximum": _inclusive("maximum", "minimum"),
    "exclusiveMinimum": _bound("exclusiveMinimum", "number", "maximum", 0),
    "exclusiveMaximum": _bound("exclusiveMaximum", "number", "minimum", 0),
    "minLength": _bound("minLength", "string", "maxLength", -1),
    "maxLength": _bound("maxLength", "string", "minLength", 1),
    "minItems": _bound("minItems", "array", "maxItems", -1),
    "maxItems": _bound("maxItems", "array", "minItems", 1),
    "minProperties": _bound("minProperties", "object", "maxProperties", -1),
    "maxProperties": _bound("maxProperties", "object", "minProperties", 1),
    "required": _required,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "prefixItems": _prefix,
    "items": _items,
    "contains": _contains,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependent("dependentRequired"),
    "dependentSchemas": _dependent("dependentSchemas"),
    "dependencies": _dependent("dependencies"),
    "format": _format,
}
