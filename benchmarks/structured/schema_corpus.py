"""Schemas with values that they accept and refuse, and whether a compiled grammar agrees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import GrammarError
from headrace.grammar.base import CompiledGrammar, GrammarMatcher, TokenVocabulary

_END = 256
_MAX_STEPS = 300


class Case(NamedTuple):
    """One schema. ``family``: the keyword it is about, or where it comes from; ``values``: (value, is it valid)."""

    family: str
    name: str
    schema: Any
    values: list[tuple[Any, bool]]


def bench_cases(path: Path) -> Iterator[Case]:
    """A JSONL file of {"name", "features", "schema", "tests": [{"data", "valid"}]}."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        family = row["name"].split("---")[0].split("_")[0]
        yield Case(
            family, row["name"], row["schema"], [(test["data"], test["valid"]) for test in row["tests"]]
        )


def suite_cases(folder: Path) -> Iterator[Case]:
    """The official test suite's files of one folder, one family a file."""
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            values = [(test["data"], test["valid"]) for test in group["tests"]]
            yield Case(path.stem, f"{path.stem}: {group['description']}", group["schema"], values)


def byte_vocabulary() -> TokenVocabulary:
    """One token a byte, so that any text can be put to a grammar."""
    tokens = [bytes([byte]) for byte in range(_END)]
    return TokenVocabulary([*tokens, b""], frozenset({_END}), (_END,), lambda text: list(text.encode()))


def accepts(grammar: CompiledGrammar, value: Any, schema: Any) -> bool:
    """Whether a grammar over bytes accepts a value in some spelling: members of objects in any order, since the grammar
    fixes one; whole numbers without a fraction. Gives up a long search, and says no."""
    for spelled in (value, _whole(value)):
        matcher = grammar.matcher.copy()
        if _take(matcher, json.dumps(spelled, ensure_ascii=False)) and matcher.is_finished():
            return True
    search = _Search(_ranks(schema, {}))
    try:
        found = search.spell(grammar.matcher.copy(), _whole(value))
    except _GaveUpError:
        return False
    return found is not None and found.is_finished()


def _take(matcher: GrammarMatcher, text: str) -> bool:
    try:
        return matcher.accept(list(text.encode("utf-8", "surrogatepass")))
    except GrammarError:
        return False  # too complex at some place: an answer would end with an error there


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e18:
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {name: _whole(item) for name, item in value.items()} if isinstance(value, dict) else value


def _ranks(schema: Any, found: dict[str, int]) -> dict[str, int]:
    """Where each name stands among all listed properties: a likely order."""
    if isinstance(schema, dict):
        for word, inner in schema.items():
            if word == "properties" and isinstance(inner, dict):
                for name in inner:
                    found.setdefault(name, len(found))
            _ranks(inner, found)
    elif isinstance(schema, list):
        for inner in schema:
            _ranks(inner, found)
    return found


class _GaveUpError(Exception):
    pass


class _Search:
    def __init__(self, ranks: dict[str, int]) -> None:
        self._ranks = ranks
        self._num_left = _MAX_STEPS

    def spell(self, matcher: GrammarMatcher | None, value: Any) -> GrammarMatcher | None:
        """The matcher behind some spelling of ``value``, or None."""
        self._num_left -= 1
        if self._num_left < 0:
            raise _GaveUpError
        if isinstance(value, dict):
            names = sorted(value, key=lambda name: self._ranks.get(name, 1 << 30))
            return self._members(self._after(matcher, "{"), value, names, "")
        if not isinstance(value, list):
            return self._after(matcher, json.dumps(value, ensure_ascii=False))
        matcher = self._after(matcher, "[")
        for index, item in enumerate(value):
            matcher = self.spell(self._after(matcher, ", ") if index else matcher, item)
        return self._after(matcher, "]")

    def _members(
        self, matcher: GrammarMatcher | None, value: dict[str, Any], left: list[str], comma: str
    ) -> GrammarMatcher | None:
        if matcher is None or not left:
            return self._after(matcher, "}")
        for name in left:
            place = self._after(matcher, f"{comma}{json.dumps(name, ensure_ascii=False)}: ")
            place = self.spell(place, value[name]) if place is not None else None
            place = (
                self._members(place, value, [other for other in left if other != name], ", ")
                if place
                else None
            )
            if place is not None:
                return place
        return None

    def _after(self, matcher: GrammarMatcher | None, text: str) -> GrammarMatcher | None:
        if matcher is None:
            return None
        place = matcher.copy()
        return place if _take(place, text) else None
