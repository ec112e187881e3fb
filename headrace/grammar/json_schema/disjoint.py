"""Disjointness: whether no value can satisfy two schemas at once. Says so only when it is sure."""

from __future__ import annotations

import json
import math
from typing import Any

from headrace.grammar.json_schema.document import SchemaDocument

ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MAX_DEPTH = 8


class Disjointness:
    """Compares parts of one document. Numbers and integers count as one type here."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._known_keys: dict[int, tuple[Any, frozenset[str]]] = {}  # the schema stays, so that its id does

    def are_disjoint(self, one: Any, other: Any, base: str, depth: int = 0) -> bool:
        """True if no value is valid under both."""
        if one is False or other is False:
            return True
        if depth > _MAX_DEPTH or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        one, other = self._flat(one, base), self._flat(other, base)
        common = self.types_of(one, base) & self.types_of(other, base)
        if not common:
            return True
        for first, second in ((one, other), (other, one)):
            values = self.values_of(first)
            if values is not None:
                if self.values_of(second) is not None:
                    theirs = self._keys(second)
                    values = [value for value in values if value_key(value) in theirs]
                return not any(self._document.is_valid(value, second) for value in values)
        for first, second in ((one, other), (other, one)):
            for word in ("anyOf", "oneOf"):
                branches = first.get(word)
                if branches and all(self.are_disjoint(part, second, base, depth + 1) for part in branches):
                    return True
            for branch in first.get("allOf", ()):
                if self.are_disjoint(branch, second, base, depth + 1):
                    return True
        return all(self._differ(kind, one, other, base, depth) for kind in common)

    def _keys(self, schema: dict[str, Any]) -> frozenset[str]:
        """The keys of a schema's values, made once for each list of them."""
        values = self.values_of(schema) or []
        name = id(schema.get("enum", schema))
        if name not in self._known_keys:
            self._known_keys[name] = (schema, frozenset(map(value_key, values)))
        return self._known_keys[name][1]

    def items_differ(self, one: Any, other: Any, base: str) -> bool:
        """True if both are arrays, or nothing, whose items can never be alike: only [] is both."""
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        one, other = self._flat(one, base), self._flat(other, base)
        if self.types_of(one, base) & self.types_of(other, base) != {"array"}:
            return False
        if "prefixItems" in one or "prefixItems" in other or isinstance(one.get("items"), list):
            return False
        return self.are_disjoint(one.get("items", True), other.get("items", True), base)

    def types_of(self, schema: Any, base: str, depth: int = 0) -> frozenset[str]:
        """The JSON types that a schema may accept."""
        if schema is False:
            return frozenset()
        if schema is True or not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return ALL_TYPES
        schema = self._flat(schema, base)
        found = ALL_TYPES
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            found = frozenset("number" if name == "integer" else name for name in names)
        values = self.values_of(schema)
        if values is not None:
            found &= frozenset(type_name(value) for value in values)
        for branch in schema.get("allOf", ()):
            found &= self.types_of(branch, base, depth + 1)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                found &= frozenset[str]().union(
                    *(self.types_of(item, base, depth + 1) for item in schema[word])
                )
        return found

    @staticmethod
    def values_of(schema: Any) -> list[Any] | None:
        """The values of an ``enum`` or ``const``, or None."""
        if not isinstance(schema, dict):
            return None
        if "const" in schema:
            return [schema["const"]]
        values = schema.get("enum")
        return values if isinstance(values, list) else None

    def _flat(self, schema: dict[str, Any], base: str) -> dict[str, Any]:
        """The schema behind a lone reference."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            _, target, base = self._document.resolve(schema["$ref"], base, "#")
            if not isinstance(target, dict):
                return {} if target is True else {"type": []}
            rest = (
                {}
                if self._document.ignores_ref_siblings
                else {k: v for k, v in schema.items() if k != "$ref"}
            )
            if any(word in target for word in rest):
                return schema
            schema = {**target, **rest}
        return schema

    def _differ(self, kind: str, one: dict[str, Any], other: dict[str, Any], base: str, depth: int) -> bool:
        """True if values of one type cannot satisfy both."""
        if kind == "object":
            return self._objects_differ(one, other, base, depth) or self._objects_differ(
                other, one, base, depth
            )
        low, high = {
            "string": ("minLength", "maxLength"),
            "array": ("minItems", "maxItems"),
            "number": ("minimum", "maximum"),
        }.get(kind, ("", ""))
        if not low:
            return False
        bounds = [(item.get(low, -math.inf), item.get(high, math.inf)) for item in (one, other)]
        are_numbers = all(isinstance(bound, int | float) for pair in bounds for bound in pair)
        if are_numbers and (bounds[0][0] > bounds[1][1] or bounds[1][0] > bounds[0][1]):
            return True
        is_filled = kind == "array" and one.get("minItems", 0) and other.get("minItems", 0)
        return bool(is_filled and self.items_differ(one, other, base))

    def _objects_differ(self, one: dict[str, Any], other: dict[str, Any], base: str, depth: int) -> bool:
        theirs, needed = other.get("properties", {}), set(other.get("required", ()))
        is_closed = other.get("additionalProperties") is False and not other.get("patternProperties")
        for name in one.get("required", ()):
            mine = one.get("properties", {}).get(name, True)
            if theirs.get(name) is False or (is_closed and name not in theirs):
                return True
            if name in needed and self.are_disjoint(mine, theirs.get(name, True), base, depth + 1):
                return True
        return False


def value_key(value: Any) -> str:
    """Equal for values that JSON Schema calls equal: 1 is 1.0, but not true."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normal(item) for item in value]
    return {name: _normal(item) for name, item in value.items()} if isinstance(value, dict) else value


def type_name(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
