"""UniqueNamesMatcher: no object of a JSON answer has a name twice, which no grammar can say.

It follows the text beside the grammar's own matcher, keeps the names of the objects that are open, and takes tokens
that would finish a name once more out of each mask.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from headrace.grammar.base import GrammarMatcher, TokenVocabulary

_BETWEEN, _BEFORE_NAME, _IN_NAME, _IN_NAME_ESCAPE, _IN_TEXT, _IN_TEXT_ESCAPE = range(6)
_QUOTE, _BACKSLASH, _COMMA = b'"'[0], b"\\"[0], b","[0]
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{"[0], b"}"[0], b"["[0], b"]"[0]


class JsonPlace(NamedTuple):
    """A place in a JSON text.

    opened: for each object that is open the names it has, for each array None; the innermost last.
    mode: where between or in the strings it is.
    name: the part of a name read so far.
    """

    opened: tuple[frozenset[bytes] | None, ...] = ()
    mode: int = _BETWEEN
    name: bytes = b""

    @property
    def has_names(self) -> bool:
        """True if an open object has a name already."""
        return any(self.opened)

    def after(self, data: bytes) -> JsonPlace | None:
        """The place after more text; None if that gives an object a name twice. The text is taken to be JSON."""
        opened, mode, name = self
        for byte in data:
            if mode == _IN_TEXT:
                mode = _BETWEEN if byte == _QUOTE else _IN_TEXT_ESCAPE if byte == _BACKSLASH else mode
            elif mode == _IN_NAME:
                if byte == _QUOTE:
                    names = opened[-1] if opened else None
                    if names is None or name in names:
                        return None
                    opened, mode, name = (*opened[:-1], names | {name}), _BETWEEN, b""
                else:
                    name += bytes((byte,))
                    mode = _IN_NAME_ESCAPE if byte == _BACKSLASH else mode
            elif mode == _IN_TEXT_ESCAPE:
                mode = _IN_TEXT
            elif mode == _IN_NAME_ESCAPE:
                name, mode = name + bytes((byte,)), _IN_NAME
            elif byte == _QUOTE:
                mode = _IN_NAME if mode == _BEFORE_NAME else _IN_TEXT
            elif byte == _OPEN_OBJECT:
                opened, mode = (*opened, frozenset()), _BEFORE_NAME
            elif byte == _OPEN_ARRAY:
                opened = (*opened, None)
            elif byte in (_CLOSE_OBJECT, _CLOSE_ARRAY):
                opened, mode = opened[:-1], _BETWEEN
            elif byte == _COMMA and opened and opened[-1] is not None:
                mode = _BEFORE_NAME
        return JsonPlace(opened, mode, name)


class NameTokens:
    """The tokens of a vocabulary that can finish a name: looked up by how they begin, or listed."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self.texts = vocabulary.tokens
        quoted = [
            (text, token)
            for token, text in enumerate(vocabulary.tokens)
            if b'"' in text and token not in vocabulary.special_ids
        ]
        self._sorted = sorted(quoted)
        self._starts = [text for text, _ in self._sorted]
        # Tokens that may hold a whole name, from quote to quote; vocabularies have few.
        wide = [token for text, token in quoted if text.count(b'"') > 1]
        self._wide = np.array(wide, np.int64)
        self._wide_bits = (1 << (self._wide & 31)).astype(np.uint32)

    def wide_in(self, words: np.ndarray) -> list[int]:
        """Tokens of a mask that may hold a whole name."""
        is_allowed = words[self._wide >> 5] & self._wide_bits
        found: list[int] = self._wide[is_allowed != 0].tolist()
        return found

    def beginning_with(self, start: bytes) -> Iterator[int]:
        """Tokens whose text begins so."""
        for text, token in self._sorted[bisect_left(self._starts, start) :]:
            if not text.startswith(start):
                return
            yield token


class UniqueNamesMatcher:
    """A matcher of JSON around another; see ``GrammarMatcher`` for the methods."""

    def __init__(
        self, inner: GrammarMatcher, tokens: NameTokens, places: tuple[JsonPlace, ...] = (JsonPlace(),)
    ) -> None:
        self._inner = inner
        self._tokens = tokens
        self._places = list(places)

    def fill_mask(self, bitmask: np.ndarray, row: int) -> None:
        self._inner.fill_mask(bitmask, row)
        place = self._places[-1]
        if not place.has_names:
            return
        words, texts = bitmask[row], self._tokens.texts
        for token in self._suspects(place, words):
            word, bit = token >> 5, 1 << (token & 31)
            if int(words[word]) & bit and place.after(texts[token]) is None:
                words[word] &= np.uint32(~bit & 0xFFFFFFFF)

    def _suspects(self, place: JsonPlace, words: np.ndarray) -> Iterator[int]:
        """Tokens that may finish a name that is there already."""
        yield from self._tokens.wide_in(words)
        names = place.opened[-1] if place.mode in (_IN_NAME, _IN_NAME_ESCAPE) else None
        for name in names or ():
            if name.startswith(place.name):
                yield from self._tokens.beginning_with(name[len(place.name) :] + b'"')

    def accept(self, token_ids: list[int]) -> bool:
        place: JsonPlace | None = self._places[-1]
        places = []
        for token in token_ids:
            place = place.after(self._tokens.texts[token]) if place is not None else None
            if place is None:
                return False
            places.append(place)
        self._places += places
        return self._inner.accept(token_ids)

    def forced_tokens(self) -> list[int]:
        forced = self._inner.forced_tokens()
        place: JsonPlace | None = self._places[-1]
        for index, token in enumerate(forced):
            place = place.after(self._tokens.texts[token]) if place is not None else None
            if place is None:
                return forced[:index]
        return forced

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        del self._places[len(self._places) - num_tokens :]

    def is_finished(self) -> bool:
        return self._inner.is_finished()

    def is_complete(self) -> bool:
        return self._inner.is_complete()

    def copy(self) -> GrammarMatcher:
        return UniqueNamesMatcher(self._inner.copy(), self._tokens, tuple(self._places))


def has_free_names(schema: Any) -> bool:
    """True if a lowered schema allows an object whose names it does not list."""
    if not isinstance(schema, dict):
        return schema is True
    if any(has_free_names(body) for body in schema.get("$defs", {}).values()):
        return True
    if "enum" in schema or "const" in schema:
        return False
    branches = [*schema.get("allOf", ()), *schema.get("anyOf", ())]
    names = schema.get("type")
    kinds = {names} if isinstance(names, str) else set(names or ())
    if (
        not kinds
        and (branches or "$ref" in schema)
        and not {"properties", "items", "prefixItems"} & set(schema)
    ):
        # A part of a conjunction that says nothing of names is closed by another part.
        return any(has_free_names(branch) for branch in branches)
    if (not kinds or "object" in kinds) and schema.get("additionalProperties", True) is not False:
        return True
    inner = [*schema.get("properties", {}).values(), *schema.get("prefixItems", ()), *branches]
    if "array" in kinds or "items" in schema:
        inner.append(schema.get("items", True))
    return bool(schema.get("patternProperties")) or any(has_free_names(part) for part in inner)
