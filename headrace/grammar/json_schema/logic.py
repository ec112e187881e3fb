"""Conjunctions and alternatives of schemas, kept small."""

from __future__ import annotations

from typing import Any


def all_of(parts: list[Any]) -> Any:
    """What all parts accept."""
    flat: list[Any] = []
    for part in parts:
        flat += part["allOf"] if isinstance(part, dict) and list(part) == ["allOf"] else [part]
    if any(part is False for part in flat):
        return False
    flat = [part for part in flat if part is not True and part != {}]
    return {"allOf": flat} if len(flat) > 1 else flat[0] if flat else True


def any_of(parts: list[Any]) -> Any:
    """What any part accepts."""
    flat: list[Any] = []
    for part in parts:
        flat += part["anyOf"] if isinstance(part, dict) and list(part) == ["anyOf"] else [part]
    if any(part is True or part == {} for part in flat):
        return True
    flat = [part for part in flat if part is not False]
    return {"anyOf": flat} if len(flat) > 1 else flat[0] if flat else False
