"""The words about arrays, in those that a grammar library enforces."""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

from headrace.grammar.json_schema.document import refuse
from headrace.grammar.json_schema.logic import any_of

if TYPE_CHECKING:
    from headrace.grammar.json_schema.lowering import SchemaLowering

MAX_ARRANGEMENTS = 4000
_MAX_VALUES = 64
_OTHER_TYPES = ["null", "boolean", "number", "string", "object"]


def array_parts(
    lowering: SchemaLowering, schema: dict[str, Any], plain: dict[str, Any], base: str, path: str
) -> list[Any]:
    """Put what can stand beside the plain words into ``plain``; the rest as further conjuncts."""
    if schema.get("uniqueItems") is True and schema.get("maxItems", 2) > 1:
        return [_unique(lowering, schema, base, path)]
    items = schema.get("items", True)
    prefix, after, word = schema.get("prefixItems", []), items, "items"
    if isinstance(items, list):  # before draft 2020-12
        prefix, after, word = items, schema.get("additionalItems", True), "additionalItems"
    if "unevaluatedItems" in schema and "items" not in schema:
        if any(name in schema for name in ("allOf", "anyOf", "oneOf", "if", "contains", "not")):
            refuse(f"{path}/unevaluatedItems", "is only supported beside prefixItems")
        after, word = schema["unevaluatedItems"], "unevaluatedItems"
    if prefix:
        name = "items" if isinstance(items, list) else "prefixItems"
        plain["prefixItems"] = [
            lowering.positive(item, base, f"{path}/{name}/{index}") for index, item in enumerate(prefix)
        ]
    if after is not True:
        plain["items"] = lowering.positive(after, base, f"{path}/{word}")
    if "contains" in schema:
        _contains(schema, plain, path)
    return []


def _contains(schema: dict[str, Any], plain: dict[str, Any], path: str) -> None:
    low, high = schema.get("minContains", 1), schema.get("maxContains")
    if low == 0 and high is None:
        return
    if schema["contains"] not in (True, {}):
        refuse(f"{path}/contains", "is not supported: describe the items by items or prefixItems")
    plain["minItems"] = max(int(low), int(schema.get("minItems", 0)))
    if high is not None:
        plain["maxItems"] = int(min(high, schema.get("maxItems", high)))


def _unique(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> Any:
    """All arrangements of the values that an item may have, if they are few."""
    values = _known_values(lowering, {"anyOf": _item_schemas(schema)}, base)
    where = f"{path}/uniqueItems"
    if values is None:
        refuse(where, "is only supported where items are an enum, booleans or a small range of integers")
    low, high = int(schema.get("minItems", 0)), min(len(values), int(schema.get("maxItems", len(values))))
    if sum(math.perm(len(values), count) for count in range(low, high + 1)) > MAX_ARRANGEMENTS:
        refuse(where, f"{len(values)} values have more than {MAX_ARRANGEMENTS} arrangements: lower maxItems")
    arrays = [
        list(arrangement)
        for count in range(low, high + 1)
        for arrangement in itertools.permutations(values, count)
    ]
    kept = [array for array in arrays if lowering.document.is_valid(array, schema)]
    names = schema.get("type", ["array", *_OTHER_TYPES])
    others = [name for name in ([names] if isinstance(names, str) else names) if name != "array"]
    return any_of([{"enum": kept} if kept else False, {"type": others} if others else False])


def _item_schemas(schema: dict[str, Any]) -> list[Any]:
    """All that an item may be held to."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return [*items, schema.get("additionalItems", True)]
    return [*schema.get("prefixItems", ()), items]


def _known_values(lowering: SchemaLowering, items: Any, base: str) -> list[Any] | None:
    """The values that an item may have, each once; None if they are not few."""
    if not isinstance(items, dict):
        return [] if items is False else None
    if "$ref" in items:
        _, target, own_base = lowering.document.resolve(items["$ref"], base, "#")
        return _known_values(lowering, target, own_base) if list(items) == ["$ref"] else None
    if list(items) == ["anyOf"]:
        lists = [_known_values(lowering, part, base) for part in items["anyOf"]]
        values = None if any(part is None for part in lists) else [v for part in lists if part for v in part]
    else:
        values = lowering.disjointness.values_of(items)
    if values is None:
        low, high = items.get("minimum"), items.get("maximum")
        if items.get("type") == "boolean":
            values = [False, True]
        elif (
            items.get("type") == "integer"
            and low is not None
            and high is not None
            and high - low < _MAX_VALUES
        ):
            values = list(range(math.ceil(low), math.floor(high) + 1))
        else:
            return None
    unique = {json.dumps(value, sort_keys=True): value for value in values}
    valid = [value for value in unique.values() if lowering.document.is_valid(value, items)]
    return valid if len(valid) <= _MAX_VALUES else None
