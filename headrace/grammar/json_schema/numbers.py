"""Numbers of a lowered schema, within what grammars compute exactly.

The library behind the grammars reads every number as a double and writes at most 16 digits of it; and whoever reads an
answer rounds its numbers to doubles: 0.99999999999999999999 is 1 there. So bounds are rounded to 15 digits, inwards,
and bounds that exclude themselves become the next number that does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from headrace.grammar.json_schema.document import refuse

_DIGITS = 15
_LARGEST_INTEGER = 2**63 - 1
_LARGEST_NUMBER = Decimal(10) ** 18
_SMALLEST_STEP = Decimal(10) ** -_DIGITS
_LARGEST_COUNT = 2**31 - 1
_EXACT_INTEGER = 2**53
_DOWN = Context(prec=_DIGITS, rounding=ROUND_FLOOR)
_WIDE = Context(prec=700)  # any double, and its whole part
_MAPS = ("properties", "patternProperties", "$defs")
_DATA = ("enum", "const", "required")


def sound_numbers(schema: Any, path: str = "#", done: dict[int, Any] | None = None) -> Any:
    """The same lowered schema, or one that accepts a little less, with numbers that a grammar keeps.

    Args:
        done: what has been made of each part, by its identity: one part stands in many places of a lowered schema,
            and is looked at once.

    Raises: GrammarError for a number of an ``enum`` that cannot be written.
    """
    if not isinstance(schema, dict | list):
        return schema
    done = {} if done is None else done
    if id(schema) not in done:
        if isinstance(schema, list):
            done[id(schema)] = [sound_numbers(part, f"{path}/{i}", done) for i, part in enumerate(schema)]
        else:
            done[id(schema)] = _sound_object(schema, path, done)
    return done[id(schema)]


def _sound_object(schema: dict[str, Any], path: str, done: dict[int, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, value in schema.items():
        where = f"{path}/{word}"
        if word in ("enum", "const"):
            _check_values(value, where)
        if word in _MAPS:
            value = {name: sound_numbers(part, f"{where}/{name}", done) for name, part in value.items()}
        elif word in ("maxLength", "maxItems", "maxProperties"):
            value = min(value, _LARGEST_COUNT)  # no answer is that long
        elif word not in _DATA:
            value = sound_numbers(value, where, done)
        found[word] = value
    _narrow(found, found.get("type") in ("integer", ["integer"]))
    return found


def _narrow(schema: dict[str, Any], is_integer: bool) -> None:
    """Bring the bounds of one schema to inclusive ones of few digits, where they are not."""
    for word, sign in (("maximum", 1), ("minimum", -1)):
        exclusive = f"exclusive{word.capitalize()}"
        bounds = [_signed(sign, schema[word])] if word in schema else []
        if exclusive in schema:
            bounds.append(_below(_signed(sign, schema[exclusive]), is_integer))
        if bounds:
            schema.pop(exclusive, None)
            if word == "maximum" and is_integer and min(bounds) >= _LARGEST_INTEGER:
                schema[word] = _LARGEST_INTEGER  # written often, and kept
                continue
            schema[word] = _plain(_WIDE.multiply(sign, _upper(min(bounds), is_integer)))


def _below(value: Decimal, is_integer: bool) -> Decimal:
    """The next number under an excluded bound."""
    if is_integer:
        return _WIDE.subtract(value.to_integral_value(ROUND_CEILING), Decimal(1))
    return -_SMALLEST_STEP if value == 0 else _DOWN.next_minus(value)


def _upper(value: Decimal, is_integer: bool) -> Decimal:
    """The largest number that is kept exactly and not above ``value``."""
    value = min(value, Decimal(_LARGEST_INTEGER) if is_integer else _LARGEST_NUMBER)
    if not is_integer and 0 < abs(value) < _SMALLEST_STEP:
        return Decimal(0) if value > 0 else -_SMALLEST_STEP
    is_exact = value == value.to_integral_value() and abs(value) <= _EXACT_INTEGER
    return value if is_exact else _DOWN.plus(value)


def _signed(sign: int, value: int | float) -> Decimal:
    return _WIDE.multiply(sign, _decimal(value))


def _decimal(value: int | float) -> Decimal:
    return Decimal(repr(value))


def _plain(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def _check_values(value: Any, path: str) -> None:
    for number in _numbers(value):
        is_exact = isinstance(number, int) and abs(number) <= _EXACT_INTEGER
        if (
            not is_exact
            and len(_WIDE.create_decimal(_decimal(number)).normalize(_WIDE).as_tuple().digits) > _DIGITS
        ):
            refuse(
                path,
                f"{number!r:.60} has more than {_DIGITS} digits, which grammars do not keep: use a string",
            )


def _numbers(value: Any) -> Iterator[int | float]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict | list):
            pending += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield item
