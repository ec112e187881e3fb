"""The jsonschema package as a validator that no schema can keep busy: its patterns are matched in linear time."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from math import isfinite
from typing import Any

from headrace.errors import GrammarError


def validator_of(schema: Any) -> Any:
    """A validator of values, ``schema`` being well-formed. It never looks for formats."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    kind = _linear(
        validator_for(schema, default=Draft202012Validator), _has_word(schema, "patternProperties")
    )
    return kind(schema)


@lru_cache
def _linear(kind: Any, has_pattern_names: bool) -> Any:
    """The validator class of a draft with its own patterns; ``has_pattern_names``: patternProperties are somewhere."""
    from jsonschema.validators import extend

    own = {
        "pattern": _pattern,
        "multipleOf": _multiple_of,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    if has_pattern_names:
        own["unevaluatedProperties"] = _refuse_unevaluated
    linear = extend(kind, {word: rule for word, rule in own.items() if word in kind.VALIDATORS})
    linear.evolve = _evolve
    return linear


def _evolve(self: Any, **changes: Any) -> Any:
    """A validator of the same class; the package's own takes up another where a part names its ``$schema``."""
    import attrs

    for field in attrs.fields(type(self)):
        if field.init:
            changes.setdefault(field.alias, getattr(self, field.name))
    return type(self)(**changes)


def _matches(pattern: str, text: str) -> bool:
    from headrace.grammar.patterns import matches  # the library behind it is not needed before

    return matches(pattern, text)


def _error(message: str) -> Any:
    from jsonschema.exceptions import ValidationError

    return ValidationError(message)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield _error(f"{instance!r:.100} does not match {pattern!r:.100}")


def _multiple_of(validator: Any, step: int | float, instance: Any, schema: Any) -> Iterator[Any]:
    """In decimals, as numbers are written; divided as doubles, 0.3 is no multiple of 0.1."""
    if not validator.is_type(instance, "number"):
        return
    if not isfinite(instance) or Fraction(repr(instance)) % Fraction(repr(step)):
        yield _error(f"{instance!r:.100} is not a multiple of {step!r:.100}")


def _pattern_properties(validator: Any, rules: dict[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        for pattern, rule in rules.items():
            for name, value in instance.items():
                if _matches(pattern, name):
                    yield from validator.descend(value, rule, path=name, schema_path=pattern)


def _additional_properties(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict) or rule is True:
        return
    patterns = schema.get("patternProperties", {})
    for name in instance:
        if name in schema.get("properties", {}) or any(_matches(pattern, name) for pattern in patterns):
            continue
        if rule is False:
            yield _error(f"the property {name!r:.100} is not allowed")
        else:
            yield from validator.descend(instance[name], rule, path=name)


def _refuse_unevaluated(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """The package puts every pattern that it finds on the way to every name."""
    raise GrammarError(
        "unevaluatedProperties beside patternProperties is not supported", param="structured_outputs.json"
    )


def _has_word(schema: Any, word: str) -> bool:
    pending = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if word in item:
                return True
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return False
