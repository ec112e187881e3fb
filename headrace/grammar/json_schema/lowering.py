"""SchemaLowering: a JSON Schema in the words that a grammar library enforces.

Words that no grammar knows are rewritten: ``not``, ``if`` and ``oneOf`` by pushing negations down to single words,
``dependentRequired`` and the like into alternatives, ``uniqueItems`` over few values into their arrangements. The
rewriting never accepts what the schema does not; what cannot be rewritten is refused with its path. Annotations are
dropped; a ``format`` that nobody checks is one, and is noted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from headrace.grammar.json_schema.arrays import array_parts
from headrace.grammar.json_schema.disjoint import Disjointness
from headrace.grammar.json_schema.document import MAX_DEPTH, SchemaDocument, refuse
from headrace.grammar.json_schema.formats import LIBRARY_FORMATS, PATTERNS
from headrace.grammar.json_schema.logic import all_of, any_of
from headrace.grammar.json_schema.negation import negate_word
from headrace.grammar.json_schema.objects import object_parts
from headrace.grammar.json_schema.self_reference import Place, pointer_of

MAX_NODES = 20_000
MAX_ONE_OF = 64
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "$comment", "comment", "deprecated"),
        *("readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"),
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$defs", "definitions", "$vocabulary"),
        *("then", "else"),
    }
)
_PLAIN = frozenset(
    {
        *("type", "pattern", "minLength", "maxLength", "minimum", "maximum", "multipleOf"),
        *("minItems", "maxItems", "required"),
    }
)
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_OBJECT_WORDS = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "minProperties", "maxProperties"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    }
)
_ARRAY_WORDS = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "uniqueItems", "contains", "minContains"),
        *("maxContains", "unevaluatedItems"),
    }
)


class SchemaLowering:
    """Rewrites one document.

    references: those that were followed, each schema's first.
    notes: what the schema says and nobody enforces, and what it allows and the grammar does not, each with its path.
    may_narrow: values that are hard to describe may be left out: inside ``oneOf``, where other branches have them or
        something like them.
    """

    def __init__(self, document: SchemaDocument) -> None:
        self.document = document
        self.disjointness = Disjointness(document)
        self.notes: list[str] = []
        self.definitions: dict[str, Any] = {}
        self.references: list[Place] = []
        self._names: dict[tuple[str, bool], str] = {}
        self._num_nodes = 0
        self.may_narrow = False

    def lower(self) -> Any:
        """The whole schema, with its definitions. Raises GrammarError naming the path of what cannot be done."""
        _ = self.document.validator  # refuses what is malformed
        schema = self.positive(self.document.root, "", "#")
        if isinstance(schema, dict) and self.definitions:
            schema = {**schema, "$defs": self.definitions}
        return schema

    def positive(self, schema: Any, base: str, path: str) -> Any:
        """What ``schema`` accepts."""
        if isinstance(schema, bool):
            return schema
        base = self._enter(schema, base, path)
        if "$ref" in schema:
            return self._with_reference(schema, base, path)
        values = self.disjointness.values_of(schema)
        if values is not None:
            # Of its own values each one is one: only the other words are left to ask.
            own = "const" if "const" in schema else "enum"
            rest = {word: value for word, value in schema.items() if word != own and word not in _ANNOTATIONS}
            kept = [value for value in values if not rest or self.document.is_valid(value, rest)]
            return {"enum": kept} if kept else False
        plain: dict[str, Any] = {}
        parts: list[Any] = []
        for word, value in schema.items():
            if word in _PLAIN:
                is_whole = isinstance(value, float) and value.is_integer()
                plain[word] = int(value) if is_whole and word in _COUNTS else value
            elif word in _LOGIC:
                parts.append(_LOGIC[word](self, schema, base, path))
            elif word == "format":
                parts.append(self._format(value, f"{path}/format"))
            elif word in ("exclusiveMinimum", "exclusiveMaximum"):
                _add_exclusive(plain, schema, word)
            elif word.startswith("$dynamic") or word == "$recursiveRef":
                if word != "$dynamicAnchor":
                    refuse(f"{path}/{word}", "dynamic references are not supported: use $ref")
            elif word not in _ANNOTATIONS and word not in _OBJECT_WORDS and word not in _ARRAY_WORDS:
                self._note(f"{path}/{word} is no keyword and says nothing")
        self._check_types(plain, path)
        if any(word in schema for word in _OBJECT_WORDS):
            parts += object_parts(self, schema, plain, base, path)
        if any(word in schema for word in _ARRAY_WORDS):
            parts += array_parts(self, schema, plain, base, path)
        return all_of([plain or True, *parts])

    def negative(self, schema: Any, base: str, path: str) -> Any:
        """What ``schema`` does not accept."""
        if isinstance(schema, bool):
            return not schema
        base = self._enter(schema, base, path)
        if "$ref" in schema:
            reference = self.reference(schema["$ref"], base, f"{path}/$ref", False)
            rest = self._rest(schema)
            return any_of([reference, self.negative(rest, base, path)] if rest else [reference])
        return any_of(
            [negate_word(self, word, schema, base, path) for word in schema if word not in _ANNOTATIONS]
        )

    def reference(self, reference: Any, base: str, path: str, is_positive: bool) -> Any:
        """A reference to a definition, which is lowered once for each sign."""
        key, target, own_base = self.document.resolve(reference, base, path)
        name = self._names.get((key, is_positive))
        if name is None:
            name = self._names[key, is_positive] = f"d{len(self._names)}"
            self.definitions[name] = True  # holds its place while it is made
            lower = self.positive if is_positive else self.negative
            self.references.append((reference, base, path))
            self.definitions[name] = lower(target, own_base, pointer_of(key))
        return {"$ref": f"#/$defs/{name}"}

    def give_up(self, path: str, problem: str) -> Any:
        """Leave out values that cannot be described, where that is allowed. Raises GrammarError elsewhere."""
        if not self.may_narrow:
            refuse(path, problem)
        self._note(f"{path} is not negated inside oneOf: the values that violate it are not generated")
        return False

    def _enter(self, schema: Any, base: str, path: str) -> str:
        if not isinstance(schema, dict):
            refuse(path, "must be an object or a boolean")
        self._num_nodes += 1
        self.document.check_time(path)
        if self._num_nodes > MAX_NODES:
            refuse(
                path, f"the schema comes to more than {MAX_NODES} parts: simplify it", "constraint_too_large"
            )
        if path.count("/") > 2 * MAX_DEPTH:
            refuse(
                path, f"is nested more than {MAX_DEPTH} levels deep: make it flatter", "constraint_too_deep"
            )
        return self.document.base_of(schema, base)

    def _rest(self, schema: dict[str, Any]) -> dict[str, Any]:
        """What a schema says beside its ``$ref``."""
        if self.document.ignores_ref_siblings:
            return {}
        return {word: value for word, value in schema.items() if word != "$ref" and word not in _ANNOTATIONS}

    def _with_reference(self, schema: dict[str, Any], base: str, path: str) -> Any:
        reference, rest = self.reference(schema["$ref"], base, f"{path}/$ref", True), self._rest(schema)
        for word in ("unevaluatedProperties", "unevaluatedItems"):
            if word in rest and rest[word] is not True:
                refuse(f"{path}/{word}", "is not supported beside $ref")
        return all_of([reference, self.positive(rest, base, path)]) if rest else reference

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _format(self, value: Any, path: str) -> Any:
        if value in PATTERNS:
            return PATTERNS[value]
        if value in LIBRARY_FORMATS:
            return {"format": value}
        self._note(f"{path} {value!r:.60} is not checked: it is taken as an annotation")
        return True

    def _check_types(self, plain: dict[str, Any], path: str) -> None:
        names = plain.get("type", [])
        for name in [names] if isinstance(names, str) else names:
            if name not in TYPES:
                refuse(f"{path}/type", f"{name!r:.60} is no type; types are {', '.join(sorted(TYPES))}")

    # ---- logic

    def _all_of(self, schema: dict[str, Any], base: str, path: str) -> Any:
        return all_of([self.positive(s, base, f"{path}/allOf/{i}") for i, s in enumerate(schema["allOf"])])

    def _any_of(self, schema: dict[str, Any], base: str, path: str) -> Any:
        return any_of([self.positive(s, base, f"{path}/anyOf/{i}") for i, s in enumerate(schema["anyOf"])])

    def _not(self, schema: dict[str, Any], base: str, path: str) -> Any:
        return self.negative(schema["not"], base, f"{path}/not")

    def _if(self, schema: dict[str, Any], base: str, path: str) -> Any:
        return any_of(
            [
                all_of(
                    [
                        self.positive(schema["if"], base, f"{path}/if"),
                        self.positive(schema.get("then", True), base, f"{path}/then"),
                    ]
                ),
                all_of(
                    [
                        self.negative(schema["if"], base, f"{path}/if"),
                        self.positive(schema.get("else", True), base, f"{path}/else"),
                    ]
                ),
            ]
        )

    def _one_of(self, schema: dict[str, Any], base: str, path: str) -> Any:
        """Each branch without the others that could be true beside it."""
        branches = schema["oneOf"]
        if len(branches) > MAX_ONE_OF:
            refuse(
                f"{path}/oneOf",
                f"has {len(branches)} branches; at most {MAX_ONE_OF} are supported: use anyOf",
            )
        rest = {word: value for word, value in schema.items() if word in ("type", "required", "properties")}
        kinds = [self.disjointness.types_of({"allOf": [rest, branch]}, base) for branch in branches]
        alternatives = []
        negated: dict[int, Any] = {}
        for i, branch in enumerate(branches):
            parts = [self.positive(branch, base, f"{path}/oneOf/{i}")]
            for j, other in enumerate(branches):
                if i == j or not kinds[i] & kinds[j]:
                    continue
                if self.disjointness.are_disjoint(branch, other, base):
                    continue
                if self.disjointness.items_differ(branch, other, base):
                    parts.append({"minItems": 1})
                else:
                    if j not in negated:
                        negated[j] = self._without(other, base, f"{path}/oneOf/{j}")
                    parts.append(negated[j])
            alternatives.append(all_of(parts))
        return any_of(alternatives)

    def _without(self, branch: Any, base: str, path: str) -> Any:
        before, self.may_narrow = self.may_narrow, True
        try:
            return self.negative(branch, base, path)
        finally:
            self.may_narrow = before

    def at_least_two(self, branches: list[Any], base: str, path: str) -> Any:
        """What more than one of ``branches`` accepts."""
        if len(branches) > MAX_ONE_OF // 4:
            refuse(path, f"has {len(branches)} branches, too many under a negation: use anyOf")
        lowered = [self.positive(branch, base, f"{path}/{i}") for i, branch in enumerate(branches)]
        return any_of([all_of(list(pair)) for pair in itertools.combinations(lowered, 2)])


def _add_exclusive(plain: dict[str, Any], schema: dict[str, Any], word: str) -> None:
    """Exclusive bounds are numbers; in draft 4 they are flags beside the bound."""
    value, bound = schema[word], word.removeprefix("exclusive").lower()
    if value is True and bound in schema:
        plain[word] = schema[bound]
    elif not isinstance(value, bool):
        plain[word] = value


_LOGIC: dict[str, Callable[[SchemaLowering, dict[str, Any], str, str], Any]] = {
    "allOf": SchemaLowering._all_of,
    "anyOf": SchemaLowering._any_of,
    "oneOf": SchemaLowering._one_of,
    "not": SchemaLowering._not,
    "if": SchemaLowering._if,
}
