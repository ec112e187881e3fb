"""The words about objects, in those that a grammar library enforces."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from headrace.grammar.json_schema.document import refuse
from headrace.grammar.json_schema.logic import all_of, any_of
from headrace.grammar.json_schema.string_sets import one_of

if TYPE_CHECKING:
    from headrace.grammar.json_schema.lowering import SchemaLowering

MAX_OPTIONAL = 1000
"""Optional properties of one object without a required one in between: any of them may come next."""

_MAX_SUBSETS_OF = 6
_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "not", "$ref", "dependentSchemas", "$dynamicRef")


def object_parts(
    lowering: SchemaLowering, schema: dict[str, Any], plain: dict[str, Any], base: str, path: str
) -> list[Any]:
    """Put what can stand beside the plain words into ``plain``; the rest as further conjuncts."""
    for word in ("properties", "patternProperties"):
        if word in schema:
            plain[word] = {
                name: lowering.positive(item, base, f"{path}/{word}/{_pointer(name)}")
                for name, item in schema[word].items()
            }
    _check_optional(schema, path)
    if "additionalProperties" in schema:
        further = schema["additionalProperties"]
        plain["additionalProperties"] = lowering.positive(further, base, f"{path}/additionalProperties")
    parts = _dependencies(lowering, schema, base, path)
    if "unevaluatedProperties" in schema:
        parts += _unevaluated(lowering, schema, plain, base, path)
    if "propertyNames" in schema:
        parts.append(_names(lowering, schema, plain, f"{path}/propertyNames"))
    if "minProperties" in schema or "maxProperties" in schema:
        parts += _counts(schema, plain, path)
    return parts


def _check_optional(schema: dict[str, Any], path: str) -> None:
    required, length = set(schema.get("required", ())), 0
    for name, item in schema.get("properties", {}).items():
        length = 0 if name in required else length + (item is not False)
        if length > MAX_OPTIONAL:
            problem = (
                f"has more than {MAX_OPTIONAL} optional properties in a row: require some, or leave some out"
            )
            refuse(f"{path}/properties", problem, "constraint_too_complex")


def _dependencies(lowering: SchemaLowering, schema: dict[str, Any], base: str, path: str) -> list[Any]:
    """Either a name is absent, or what depends on it holds."""
    parts = []
    for word in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needed in schema.get(word, {}).items():
            if isinstance(needed, list):
                holds: Any = {"required": [name, *needed]}
            else:
                where = f"{path}/{word}/{_pointer(name)}"
                holds = all_of([{"required": [name]}, lowering.positive(needed, base, where)])
            parts.append(any_of([{"properties": {name: False}}, holds]))
    return parts


def _unevaluated(
    lowering: SchemaLowering, schema: dict[str, Any], plain: dict[str, Any], base: str, path: str
) -> list[Any]:
    """Names that nothing else speaks of. Supported where those names are known beforehand."""
    where = f"{path}/unevaluatedProperties"
    if schema["unevaluatedProperties"] in (True, {}) or "additionalProperties" in schema:
        return []
    further = lowering.positive(schema["unevaluatedProperties"], base, where)
    names = _known_names(lowering, schema, base, 0)
    if names is None:
        refuse(where, "is only supported beside properties, and allOf and $ref of such")
    if not any(word in schema for word in _IN_PLACE):
        plain["additionalProperties"] = further
        return []
    return [{"properties": dict.fromkeys(sorted(names), True), "additionalProperties": further}]


def _known_names(lowering: SchemaLowering, schema: Any, base: str, depth: int) -> set[str] | None:
    """The names that a schema speaks of, None if they depend on the value."""
    if isinstance(schema, bool):
        return set()
    if depth > 8 or any(
        word in schema for word in (*_IN_PLACE, "patternProperties") if word not in ("allOf", "$ref")
    ):
        return None
    if depth and ("additionalProperties" in schema or "unevaluatedProperties" in schema):
        return None
    names = set(schema.get("properties", {}))
    others = [(item, base) for item in schema.get("allOf", ())]
    if "$ref" in schema:
        _, target, own_base = lowering.document.resolve(schema["$ref"], base, "#")
        others.append((target, own_base))
    for other, own_base in others:
        found = _known_names(lowering, other, own_base, depth + 1)
        if found is None:
            return None
        names |= found
    return names


def _names(lowering: SchemaLowering, schema: dict[str, Any], plain: dict[str, Any], path: str) -> Any:
    """``propertyNames`` as a pattern of all names; listed ones are judged here."""
    rule = schema["propertyNames"]
    if rule is True or rule == {}:
        return True
    if rule is False:
        return {"maxProperties": 0}
    values = lowering.disjointness.values_of(rule)
    listed = {name: lowering.document.is_valid(name, rule) for name in schema.get("properties", {})}
    words = set(rule) - {"type", "title", "description", "$comment"}
    if values is not None:
        texts = [
            value for value in values if isinstance(value, str) and lowering.document.is_valid(value, rule)
        ]
        if not texts:
            return {"maxProperties": 0}
        pattern = one_of(texts)
    elif words == {"pattern"}:
        pattern = rule["pattern"]
    elif words and words <= {"minLength", "maxLength"}:
        pattern = rf"^[\s\S]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"
    elif not words:
        return True
    else:
        refuse(path, "is only supported as a pattern, an enum, or a length")
    if "patternProperties" in schema:
        refuse(path, "is not supported beside patternProperties: put the condition into their patterns")
    further = plain.pop("additionalProperties", True)
    if further is not False:
        plain["patternProperties"] = {pattern: further}
    plain["additionalProperties"] = False
    if listed:
        plain["properties"] = {
            name: plain["properties"][name] if ok else False for name, ok in listed.items()
        }
    return True


def _counts(schema: dict[str, Any], plain: dict[str, Any], path: str) -> list[Any]:
    """``minProperties`` and ``maxProperties`` where optional names are listed: by which of them are there."""
    low, high = int(schema.get("minProperties", 0)), schema.get("maxProperties")
    needed = set(schema.get("required", ()))
    optional = [n for n, item in plain.get("properties", {}).items() if n not in needed and item is not False]
    is_closed = plain.get("additionalProperties") is False and not plain.get("patternProperties")
    most = len(needed) + len(optional) if is_closed else None
    if high is not None and most is not None and most <= high:
        high = None
    if low <= len(needed) and high is None:
        return []
    bounds = {"minProperties": low} if low > len(needed) else {}
    if high is not None:
        bounds["maxProperties"] = int(high)
    if not optional:
        plain.update(bounds)
        return []
    if len(optional) <= _MAX_SUBSETS_OF:
        return [_by_subsets(needed, optional, bounds, is_closed)]
    if high is None and low == len(needed) + 1:
        return [_by_first(optional, low, is_closed)]
    refuse(
        f"{path}/{'minProperties' if low else 'maxProperties'}",
        f"is not supported beside {len(optional)} optional properties: require them, or leave the count out",
    )


def _by_subsets(needed: set[str], optional: list[str], bounds: dict[str, int], is_closed: bool) -> Any:
    branches = []
    for count in range(len(optional) + 1):
        total = len(needed) + count
        if total > bounds.get("maxProperties", total) or (
            is_closed and total < bounds.get("minProperties", 0)
        ):
            continue
        for present in itertools.combinations(optional, count):
            branches.append(_branch(present, optional, {} if is_closed else bounds))
    return any_of(branches)


def _by_first(optional: list[str], low: int, is_closed: bool) -> Any:
    """One more than the required: the first optional name that is there makes a branch."""
    branches = [
        {"required": [name], "properties": dict.fromkeys(optional[:index], False)}
        for index, name in enumerate(optional)
    ]
    if not is_closed:
        branches.append(_branch((), optional, {"minProperties": low}))
    return any_of(branches)


def _branch(present: tuple[str, ...], optional: list[str], bounds: dict[str, int]) -> dict[str, Any]:
    absent = [name for name in optional if name not in present]
    branch: dict[str, Any] = {"properties": dict.fromkeys(absent, False)} if absent else {}
    if present:
        branch["required"] = list(present)
    return {**branch, **bounds}


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
