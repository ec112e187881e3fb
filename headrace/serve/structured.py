"""What an answer must be, in each spelling of the API: response_format, structured_outputs, guided_*."""

from __future__ import annotations

from typing import Any

from headrace.errors import RequestError
from headrace.serve.errors import ApiError
from headrace.serve.protocol import GenerationRequest
from headrace.structured_outputs import KINDS, StructuredOutputsParams

_FORMATS = "'text', 'json_object', 'json_schema' or 'structural_tag'"
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_OPTIONS = ("disable_any_whitespace", "backend")


def structured_params(request: GenerationRequest) -> StructuredOutputsParams | None:
    """The constraint of a request, or None. Raises ApiError 400 naming the field at fault."""
    found: list[tuple[str, dict[str, Any]]] = []
    if request.response_format is not None:
        fields = _from_format(request.response_format)
        if fields is not None:
            found.append(("response_format", fields))
    if request.structured_outputs is not None:
        fields = _from_structured(request.structured_outputs)
        if fields is not None:
            found.append(("structured_outputs", fields))
    for name, kind in _GUIDED.items():
        value = getattr(request, name)
        if value is not None:
            found.append((name, {kind: value}))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise _error(found[1][0], f"{names} both say what the answer must be: send one of them")
    if not found:
        return None
    name, fields = found[0]
    try:
        return StructuredOutputsParams(**fields)
    except RequestError as error:
        raise _error(name, f"{name}: {error.message}") from None


def _from_format(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        raise _error("response_format", "response_format must be an object with a type")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": value}
    if kind == "json_schema":
        return {"json": _schema_of(value)}
    raise _error("response_format", f"response_format.type must be {_FORMATS}; got {kind!r:.100}")


def _schema_of(value: dict[str, Any]) -> Any:
    """The schema, strict or not: a schema is always kept."""
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict | bool):
        raise _error(
            "response_format",
            "response_format.json_schema must be an object with a name and a schema, which is an object",
        )
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _error("response_format", "response_format.json_schema.strict must be true or false")
    return inner["schema"]


def _from_structured(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        raise _error("structured_outputs", "structured_outputs must be an object")
    given = {name: item for name, item in value.items() if item is not None}
    for name in given:
        if name not in KINDS and name not in _OPTIONS:
            known = ", ".join([*KINDS, *_OPTIONS])
            raise _error(
                "structured_outputs", f"structured_outputs has no field {name!r:.100}; known: {known}"
            )
    return given or None


def _error(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
