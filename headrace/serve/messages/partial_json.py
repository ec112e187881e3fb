"""What the beginning of a JSON object says: for calls that a limit cut."""

from __future__ import annotations

import json
from typing import Any

_CLOSING = {"{": "}", "[": "]"}


def partial_object(text: str) -> dict[str, Any]:
    """The members that are whole in ``text``, the beginning of an object: what the official client makes of a stream.

    A number at the very end counts, though it may be cut; a string does not.
    """
    ends = _possible_ends(text)
    for position, closing in reversed(ends):
        try:
            value = json.loads(text[:position] + closing)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def _possible_ends(text: str) -> list[tuple[int, str]]:
    """The last places where the text might end, with what would close it there: behind each comma's left side, each
    bracket, and at the very end. The last few are enough: what is open behind them is one member."""
    open_brackets: list[str] = []
    ends: list[tuple[int, str]] = [(0, "{}")]
    in_string = is_escaped = False
    for position, char in enumerate(text):
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
            continue
        if char == '"':
            in_string = True
        elif char in _CLOSING:
            open_brackets.append(char)
            ends.append((position + 1, _closing(open_brackets)))
        elif char in "}]":
            open_brackets.pop()
            ends.append((position + 1, _closing(open_brackets)))
        elif char == ",":
            ends.append((position, _closing(open_brackets)))
        del ends[:-4]
    ends.append((len(text), _closing(open_brackets)))
    return ends


def _closing(open_brackets: list[str]) -> str:
    return "".join(_CLOSING[bracket] for bracket in reversed(open_brackets))
