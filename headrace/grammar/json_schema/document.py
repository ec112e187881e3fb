"""SchemaDocument: one JSON Schema with its references, in whatever draft it is written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import unquote, urljoin

from headrace.errors import GrammarError
from headrace.grammar.json_schema.validation import validator_of

MAX_DEPTH = 96
MAX_LOWERING_S = 5.0
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")
_OLD_IDS = ("draft-03", "draft-04")
_DATA = ("enum", "const", "default", "examples", "example")
# What holds schemas by name, and what holds data that only looks like schemas.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class SchemaDocument:
    """Finds what a ``$ref`` means. Everything must be in the document itself.

    root: the schema.
    ignores_ref_siblings: before draft 2019-09, words beside a ``$ref`` say nothing.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        _check_depth(root)
        self.root = root
        self._end_s = time.thread_time() + MAX_LOWERING_S
        dialect = str(root.get("$schema", ""))
        self.ignores_ref_siblings = any(draft in dialect for draft in _OLD_DRAFTS)
        self._id_word = "id" if any(draft in dialect for draft in _OLD_IDS) else "$id"

    @cached_property
    def validator(self) -> Any:
        """jsonschema's validator of the whole document; ``evolve(schema=...)`` makes one of a part.

        Raises: GrammarError when the schema itself is malformed.
        """
        from jsonschema import Draft202012Validator, FormatChecker
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for

        if not isinstance(self.root.get("$schema", ""), str):
            refuse("#/$schema", "must be a string: the address of a draft")
        kind = validator_for(self.root, default=Draft202012Validator)
        try:
            # Without formats: whether a pattern is one is for the library that matches it to say, not for Python's re.
            kind.check_schema(self.root, format_checker=FormatChecker(()))
        except SchemaError as error:
            path = "#" + "".join(f"/{part}" for part in error.absolute_path)
            refuse(path, f"the schema is malformed: {error.message[:300]}")
        return validator_of(self.root)

    def is_valid(self, value: Any, schema: Any) -> bool:
        """Whether a part of the document accepts a value."""
        from referencing.exceptions import Unresolvable

        self.check_time()
        try:
            return bool(self.validator.evolve(schema=schema).is_valid(value))
        except Unresolvable as error:
            refuse("#", f"a reference cannot be resolved: {error}")

    def check_time(self, path: str = "#") -> None:
        """Raises GrammarError when the schema has taken too long; whoever works on it asks now and then."""
        if time.thread_time() > self._end_s:
            problem = f"the schema takes more than {MAX_LOWERING_S:g} s to be prepared: simplify it"
            refuse(path, problem, "constraint_too_complex")

    def resolve(self, reference: Any, base: str, path: str) -> tuple[str, Any, str]:
        """(key, schema, base) of a reference; equal keys mean the same schema.

        Args:
            base: the base URI where the reference stands.
            path: where it stands, for errors.

        Raises: GrammarError for a reference that leaves the document or points at nothing.
        """
        if not isinstance(reference, str):
            refuse(path, "must be a string")
        target = _join(base, reference, path) if base else reference
        address, _, fragment = target.partition("#")
        if address not in self._resources:
            refuse(path, f"{reference[:200]!r} leaves the schema: remote references are not followed")
        schema, own_base = self._resources[address]
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            anchors = self._anchors.get((address, fragment))
            if anchors is None:
                refuse(path, f"there is no anchor {fragment[:200]!r}")
            schema, own_base = anchors
            return f"{address}#{fragment}", schema, own_base
        for part in fragment.split("/")[1:]:
            schema, own_base = self._step(
                schema, part.replace("~1", "/").replace("~0", "~"), own_base, path, reference
            )
        return f"{address}#{fragment}", schema, own_base

    def base_of(self, schema: dict[str, Any], base: str) -> str:
        """The base URI inside ``schema``."""
        own = schema.get(self._id_word)
        if (
            not isinstance(own, str)
            or own.startswith("#")
            or ("$ref" in schema and self.ignores_ref_siblings)
        ):
            return base
        return _join(base, own, f"#/{self._id_word}").partition("#")[0]

    def _step(self, schema: Any, name: str, base: str, path: str, reference: str) -> tuple[Any, str]:
        try:
            found = schema[int(name)] if isinstance(schema, list) else schema[name]
        except (KeyError, IndexError, ValueError, TypeError):
            refuse(path, f"{reference[:200]!r} points at nothing")
        return found, self.base_of(found, base) if isinstance(found, dict) else base

    @cached_property
    def _resources(self) -> dict[str, tuple[Any, str]]:
        """{absolute address: (schema, base)} of every schema with an address of its own."""
        start = self.base_of(self.root, "")
        found: dict[str, tuple[Any, str]] = {"": (self.root, start), start: (self.root, start)}
        for schema, base in self._walk(self.root, "", 0):
            found.setdefault(base, (schema, base))
        return found

    @cached_property
    def _anchors(self) -> dict[tuple[str, str], tuple[Any, str]]:
        found: dict[tuple[str, str], tuple[Any, str]] = {}
        for schema, base in self._walk(self.root, "", 0):
            for word in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(word), str):
                    found[base, schema[word]] = schema, base
            own = schema.get(self._id_word)
            if isinstance(own, str) and own.startswith("#"):
                found[base, own[1:]] = schema, base
        return found

    def _walk(self, schema: Any, base: str, depth: int) -> Iterator[tuple[dict[str, Any], str]]:
        if isinstance(schema, list):
            for item in schema:
                yield from self._walk(item, base, depth + 1)
        elif isinstance(schema, dict):
            base = self.base_of(schema, base)
            yield schema, base
            for word, value in schema.items():
                if word in _MAPS and isinstance(value, dict):
                    for item in value.values():
                        yield from self._walk(item, base, depth + 1)
                elif word not in _DATA:
                    yield from self._walk(value, base, depth + 1)


def _join(base: str, reference: str, path: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError as error:
        refuse(path, f"{reference[:200]!r} is no address ({error})")


def _check_depth(root: Any) -> None:
    """Whatever follows walks the document recursively."""
    level, depth = [root], 0
    while level:
        if depth > MAX_DEPTH:
            problem = f"the schema is nested more than {MAX_DEPTH} levels deep: make it flatter"
            refuse("#", problem, "constraint_too_deep")
        inner: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            inner += [child for child in children if isinstance(child, dict | list)]
        level, depth = inner, depth + 1


def refuse(path: str, problem: str, code: str = "unsupported_schema") -> NoReturn:
    """Raises GrammarError that names the path."""
    raise GrammarError(f"schema {path}: {problem}", param="structured_outputs.json", code=code)
