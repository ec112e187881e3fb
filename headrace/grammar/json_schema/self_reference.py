"""References that come back to themselves at the same value: no reader of such a schema ever ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from headrace.grammar.json_schema.document import SchemaDocument, refuse

_LISTS = ("allOf", "anyOf", "oneOf")
_BY_NAME = ("dependentSchemas", "dependencies")
Place = tuple[Any, str, str]
"""(what stands there, the base URI around it, its path)."""


def refuse_circles(document: SchemaDocument, references: Iterable[Place]) -> None:
    """Refuse references that lead back to themselves without entering a member or an item in between.

    Raises: GrammarError naming the path of one that closes a circle.
    """
    done: set[str] = set()
    for reference in references:
        _follow(document, reference, done, frozenset())


def _follow(document: SchemaDocument, reference: Place, done: set[str], around: frozenset[str]) -> None:
    key, target, base = document.resolve(*reference)
    if key in around:
        problem = "leads back to itself at the same value: put a property or an item in between"
        refuse(reference[2], problem, "endless_reference")
    if key not in done:
        for inner in _references_of(document, (target, base, pointer_of(key))):
            _follow(document, inner, done, around | {key})
        done.add(key)


def _references_of(document: SchemaDocument, place: Place) -> Iterator[Place]:
    """The references that a schema asks about the very value that it is asked about."""
    schema, base, path = place
    if not isinstance(schema, dict):
        return
    base = document.base_of(schema, base)
    if "$ref" in schema:
        yield schema["$ref"], base, f"{path}/$ref"
        if document.ignores_ref_siblings:
            return
    words = ("not", "if", "then", "else") if "if" in schema else ("not",)
    parts = [(f"{path}/{word}", schema[word]) for word in words if word in schema]
    for word in _LISTS:
        parts += [(f"{path}/{word}/{index}", part) for index, part in enumerate(schema.get(word, ()))]
    for word in _BY_NAME:
        parts += [(f"{path}/{word}/{name}", part) for name, part in schema.get(word, {}).items()]
    for where, part in parts:
        yield from _references_of(document, (part, base, where))


def pointer_of(key: str) -> str:
    """How errors name the schema that ``SchemaDocument.resolve`` gave this key."""
    return key if key.startswith("#") else f"#({key})"
