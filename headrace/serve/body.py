"""Request bodies: read within a limit, decoded into a typed struct, refused in words a person can use."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headrace.serve.errors import ApiError, ClientGone, bad_request
from headrace.serve.known_values import known_values

T = TypeVar("T", bound=msgspec.Struct)

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_EXPECTED = re.compile(r"Expected `(.*)`, got `(.*)`")
_MANY_NUMBERS = re.compile(rb"\d[\d,\s]{62,}\d")
_BYTES_PER_NUMBER = 16  # where a body is mostly numbers
_TOO_LONG = re.compile(r"Expected `str` of length <= (\d+)")
_WRONG_VALUE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_PATH = re.compile(r" - at `(.*)`$", re.DOTALL)
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError (413 when it is too large, 415 when it is not JSON), ClientGone."""
    _check_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def _check_type(request: Request) -> None:
    kind, _, rest = request.headers.get("content-type", "").partition(";")
    if kind.strip() and not _JSON_TYPE.fullmatch(kind.strip().lower()):
        raise ApiError(415, f"the body must be JSON (Content-Type: application/json); got {kind.strip()!r}")
    charset = re.search(r"charset=\"?([^\s\";]+)", rest.lower())
    if charset and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"the body must be UTF-8; got charset {charset[1]!r}")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "the body must not be compressed: send it without Content-Encoding")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {max_bytes} bytes", code="request_too_large")


def decode_body(body: bytes, kind: type[T]) -> T:
    """``body`` as a ``kind``. Raises ApiError 400 naming what is wrong and where."""
    if not body.strip():
        raise bad_request("the request body is empty; it must be a JSON object")
    try:
        decoded = msgspec.json.decode(body, type=kind)
        refuse_repeated(body)
        return decoded
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = "it has a lone surrogate, which no text can hold" if _is_json(body) else str(error)
        raise bad_request(f"the request body is not valid JSON: {problem}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the request body is nested too deeply to be read", code="invalid_json") from None


def refuse_repeated(body: bytes) -> None:
    """Raises ApiError 400 for an object that has a name twice: which value is meant cannot be known."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            name = next(name for index, name in enumerate(names) if name in names[:index])[:100]
            raise bad_request(
                f"an object of the body has the name {name!r} twice", name, code="repeated_field"
            )

    def read(text: bytes) -> None:
        json.loads(text, object_pairs_hook=check, parse_int=str, parse_float=str)

    if body.count(b",") * _BYTES_PER_NUMBER > len(body):
        # A prompt of a million token ids is read as one number: only names matter.
        with contextlib.suppress(ValueError, ApiError):  # of what was left out, or of the body itself
            return read(_MANY_NUMBERS.sub(b"0", body))
    return read(body)


def _is_json(body: bytes) -> bool:
    """True for what would be JSON if surrogates could stand alone, as Python's reader lets them."""
    try:
        json.loads(body, parse_int=str, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def decode_value(value: Any, kind: type[T], where: str) -> T:
    """A part of a body, decoded already, as a ``kind``. Raises ApiError 400; ``where`` is its path in the body."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, where) from None


def _explain(text: str, kind: type[msgspec.Struct], outer: str = "") -> ApiError:
    found = _PATH.search(text)
    text = text[: found.start()] if found else text
    path = outer + (found[1].removeprefix("$") if found else "")
    path = path.removeprefix(".")
    param = re.split(r"[.\[]", path)[0] or None
    where = path or "the request body"
    if unknown := _UNKNOWN.fullmatch(text):
        return _unknown_field(unknown[1], path, () if path else kind.__struct_fields__)
    if missing := _MISSING.fullmatch(text):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{where} lacks the field {missing[1]!r}", name, code="missing_field")
    if wrong := _WRONG_VALUE.fullmatch(text):
        values = list(map(repr, known_values(kind, found[1].removeprefix("$") if found else "")))
        wanted = f"one of {', '.join(values)}" if len(values) > 1 else "".join(values) or "another value"
        text = f"{where} must be {wanted}; got {wrong[1][:100]}"
        return bad_request(text, param)
    if too_long := _TOO_LONG.fullmatch(text):
        return bad_request(f"{where} must have at most {too_long[1]} characters", param)
    if expected := _EXPECTED.fullmatch(text):
        text = f"{where} must be {_spell(expected[1])}; got {_spell(expected[2])}"
    else:
        text = f"{where}: {text}"
    return bad_request(text, param, code="invalid_type" if expected else "invalid_value")


def _spell(kinds: str) -> str:
    return " or ".join(_WORDS.get(kind, kind) for kind in kinds.split(" | "))


def refuse_unknown(value: Iterable[str], known: Iterable[str], where: str) -> None:
    """For objects that no struct describes. Raises ApiError 400 for the first field that is not known."""
    known = list(known)
    for name in value:
        if name not in known:
            raise _unknown_field(name, where, known)


def _unknown_field(name: str, path: str, known: Iterable[str]) -> ApiError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "; leave it out"
    message = f"{path} has no field {name[:100]!r}{hint}" if path else f"unknown field {name[:100]!r}{hint}"
    return bad_request(message, f"{path}.{name[:100]}" if path else name[:100], code="unknown_field")
