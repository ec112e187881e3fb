"""Productivity: whether a schema that refers to itself accepts anything finite. A grammar that does not would be
followed until the answer's limit."""

from __future__ import annotations

from typing import Any

_PREFIX = "#/$defs/"


def without_endless(schema: Any) -> Any:
    """A lowered schema in which definitions that accept nothing finite are false; False if that is all of it."""
    if not isinstance(schema, dict) or "$defs" not in schema:
        return schema
    definitions: dict[str, Any] = schema["$defs"]
    finite: set[str] = set()
    while True:
        found = {
            name for name, body in definitions.items() if name not in finite and _is_finite(body, finite)
        }
        if not found:
            break
        finite |= found
    if not _is_finite({word: value for word, value in schema.items() if word != "$defs"}, finite):
        return False
    return {
        **schema,
        "$defs": {name: body if name in finite else False for name, body in definitions.items()},
    }


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """True unless every value of the schema has to hold a definition that is not known to be finite."""
    if not isinstance(schema, dict):
        return schema is not False
    reference = schema.get("$ref")
    if reference is not None and reference.removeprefix(_PREFIX) not in finite:
        return False
    if not all(_is_finite(part, finite) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_is_finite(part, finite) for part in schema["anyOf"]):
        return False
    names = schema.get("type", ())
    if names == "object":
        needed = (schema.get("properties", {}).get(name, True) for name in schema.get("required", ()))
        return all(_is_finite(part, finite) for part in needed)
    if names == "array" and schema.get("minItems", 0) > 0:
        first = (schema.get("prefixItems") or [schema.get("items", True)])[: schema["minItems"]]
        return all(_is_finite(part, finite) for part in first)
    return True
