"""Numbers of schemas that doubles, or the grammar library's digits, do not hold: never unsound."""

from __future__ import annotations

import json
import math
from decimal import Decimal, localcontext
from typing import Any

import jsonschema
import pytest

from headrace.errors import GrammarError
from headrace.grammar.answer_check import AnswerCheck
from headrace.grammar.base import GrammarMatcher
from headrace.grammar.json_schema import lower_schema
from headrace.grammar.patterns import byte_backend
from headrace.structured_outputs import Constraint, StructuredOutputsParams

BOUNDS = [
    0, 1, -1, 5, 100, 0.1, -0.5, 2.5, 1e-7, 1e-30, -1e-30, 5e-324, 0.9999999999999999, 99.99999999999999,
    123456789.12345679, 0.30000000000000004, 1e15, 999999999999999, 12345678901234567, 2**53 + 1, -(2**53) - 1,
    2**62 + 1, -(2**62) - 1, 2**63 - 2, 2**63 - 1, 2**63, -(2**63) - 1, 10**18 + 1, 10**30, -(10**30), 1e30, -1e300,
]  # fmt: skip
WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def compiled(schema: dict[str, Any]) -> GrammarMatcher | None:
    """The schema's grammar over bytes; None if it is refused."""
    try:
        return byte_backend().compile(Constraint("json", json.dumps(lower_schema(schema)[0]))).matcher
    except GrammarError:
        return None


def accepts(grammar: GrammarMatcher, text: str) -> bool:
    matcher = grammar.copy()
    return matcher.accept(list(text.encode())) and matcher.is_finished()


def texts_near(bound: int | float) -> list[str]:
    """Numbers around a bound, some closer than doubles are to one another."""
    value = float(bound)
    found = [str(bound + step) for step in (-10000, -1, 0, 1, 10000)] if isinstance(bound, int) else []
    found += map(repr, (value, math.nextafter(value, -math.inf), math.nextafter(value, math.inf)))
    with localcontext(prec=60):
        exact = Decimal(repr(bound))
        step = Decimal(10) ** (exact.adjusted() - 25)
        found += [format(exact - step, "f"), format(exact + step, "f")]
    return [text for text in found if "e" not in text]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "string"], None], ids=str)
def test_a_bound_is_sound(bound: float, kind: Any) -> None:
    for word in WORDS:
        schema = {word: bound} if kind is None else {"type": kind, word: bound}
        grammar = compiled(schema)
        for text in texts_near(bound) if grammar is not None else ():
            assert not accepts(grammar, text) or jsonschema.Draft202012Validator(schema).is_valid(
                json.loads(text)
            ), text


def test_bounds_that_are_common_stay_exact() -> None:
    for schema in (
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"type": "number", "minimum": -0.5, "maximum": 2.5},
    ):
        assert lower_schema(schema)[0] == schema
    assert lower_schema({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 5})[0] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 4,
    }


def test_counts_that_no_answer_reaches_are_taken() -> None:
    for kind, word in (("string", "maxLength"), ("array", "maxItems"), ("object", "maxProperties")):
        for count in (10**10, 2**63 - 1, 10**30):
            assert compiled({"type": kind, word: count}) is not None


@pytest.mark.parametrize("value", [2**53 + 1, 123456789.12345679, 2**63])
def test_values_with_too_many_digits_are_refused(value: float) -> None:
    for schema in (
        {"const": value},
        {"enum": ["a", {"b": [value]}]},
        {"properties": {"a": {"const": value}}},
    ):
        with pytest.raises(GrammarError, match="digits"):
            lower_schema(schema)
    assert lower_schema({"enum": [2**53, 0.1, -0.0, 1e22, True]})


def test_multiples_are_counted_in_decimals() -> None:
    check = AnswerCheck(StructuredOutputsParams(json={"multipleOf": 0.01}).to_constraint())
    for text in ("0.3", "19.99", "2.01", "-4.35", "7", "0"):
        assert check.problem(text) is None
    for text in ("0.305", "1e-3", "1e999"):
        assert check.problem(text) is not None
    assert (
        AnswerCheck(StructuredOutputsParams(json={"multipleOf": 3}).to_constraint()).problem("7") is not None
    )
