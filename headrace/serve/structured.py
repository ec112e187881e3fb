"""What an answer must be, in each spelling of the API: response_format, structured_outputs, guided_*."""

from __future__ import annotations

import re
from typing import Any

from headrace.serve.body import refuse_unknown
from headrace.serve.errors import bad_request
from headrace.serve.field_names import FieldNames
from headrace.serve.protocol import ChatRequest, GenerationRequest
from headrace.structured_outputs import KINDS, StructuredOutputsParams

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_OPTIONS = ("disable_any_whitespace", "backend")
# The types of response_format, and what stands beside each.
_FORMATS: dict[Any, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "structural_tag": ("format", "structures", "triggers"),
}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def structured_params(request: GenerationRequest) -> StructuredOutputsParams | None:
    """The constraint of a request, or None. Raises ApiError 400, RequestError naming the field at fault."""
    found = _constraints(request)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise bad_request(f"{first} and {second} both say what the answer must be: send one of them", second)
    return StructuredOutputsParams(**next(iter(found.values()))) if found else None


def constraint_names(request: GenerationRequest) -> FieldNames:
    """What the client calls ``structured_outputs`` and its parts; ``param`` is the field of the request."""
    form = request.response_format
    is_text = form is None or (isinstance(form, dict) and form.get("type") == "text")
    others = [name for name in (*_GUIDED, "structured_outputs") if getattr(request, name) is not None]
    if len(others) + (not is_text) > 1:
        return FieldNames({}, {})  # refused, under the names that the client gave
    top, kind, path = _spelling(request)
    params = {f"structured_outputs.{part}": top for part in (*KINDS, *_OPTIONS)}
    return FieldNames({"structured_outputs": top, f"structured_outputs.{kind}": path}, params)


def _spelling(request: GenerationRequest) -> tuple[str, str, str]:
    """(field of the request that holds its constraint, the constraint's kind, where in the request it stands)."""
    for name, kind in _GUIDED.items():
        if getattr(request, name) is not None:
            return name, kind, name
    form = request.response_format
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return "response_format", "json", "response_format.json_schema.schema"
    if isinstance(form, dict) and form.get("type") != "text":
        return "response_format", "structural_tag", "response_format"
    if request.structured_outputs is None and isinstance(request, ChatRequest) and request.tools:
        return "tools", "structural_tag", "tools"
    return "structured_outputs", "json", "structured_outputs.json"


def _constraints(request: GenerationRequest) -> dict[str, dict[str, Any]]:
    """{field of the request: what it asks for, as fields of StructuredOutputsParams}."""
    found = {
        "response_format": _from_format(request.response_format),
        "structured_outputs": _from_structured(request.structured_outputs),
    }
    for name, kind in _GUIDED.items():
        value = getattr(request, name)
        found[name] = None if value is None else {kind: value}
    return {name: fields for name, fields in found.items() if fields is not None}


def _from_format(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_request("response_format must be an object with a type", "response_format")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = ", ".join(map(repr, _FORMATS))
        raise bad_request(
            f"response_format.type must be one of {known}; got {kind!r:.100}", "response_format"
        )
    for name in (name for fields in _FORMATS.values() for name in fields):
        if value.get(name) is not None and name not in _FORMATS[kind]:
            raise bad_request(
                f"response_format.{name} says nothing beside type {kind!r}: leave it out", "response_format"
            )
    refuse_unknown(
        value, ("type", *(name for fields in _FORMATS.values() for name in fields)), "response_format"
    )
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    return {"structural_tag": value} if kind == "structural_tag" else {"json": _schema_of(value)}


def _schema_of(value: dict[str, Any]) -> Any:
    """The schema, strict or not: a schema is always kept."""
    inner, where = value.get("json_schema"), "response_format.json_schema"
    if not isinstance(inner, dict):
        raise bad_request(f"{where} must be an object with a name and a schema", "response_format")
    refuse_unknown(inner, ("name", "description", "schema", "strict"), where)
    name, schema = inner.get("name"), inner.get("schema")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{where}.name must be 1 to 64 letters, digits, _ or - in ASCII; got {name!r:.100}",
            "response_format",
        )
    if not isinstance(schema, dict | bool):
        raise bad_request(f"{where}.schema must be a JSON Schema, which is an object", "response_format")
    for field, kind, words in (("strict", bool, "true or false"), ("description", str, "a string")):
        if inner.get(field) is not None and not isinstance(inner[field], kind):
            raise bad_request(f"{where}.{field} must be {words}", "response_format")
    return schema


def _from_structured(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_request("structured_outputs must be an object", "structured_outputs")
    refuse_unknown(value, (*KINDS, *_OPTIONS), "structured_outputs")
    return {name: item for name, item in value.items() if item is not None}
