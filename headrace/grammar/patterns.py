"""Patterns of JSON Schemas on texts, in a time that grows with the text alone.

Python's ``re`` tries one way after the other, and a pattern like ``(a+)+$`` has more of them than can ever be tried.
Schemas come from strangers; so patterns on texts of theirs, or of a model, are matched by the library that enforces
them.
"""

from __future__ import annotations

import json
from functools import lru_cache

from headrace.grammar.base import GrammarBackend, GrammarMatcher, TokenVocabulary, load_backend
from headrace.structured_outputs import Constraint

_END = 256
_MAX_PATTERNS = 256


@lru_cache(1)
def byte_backend() -> GrammarBackend:
    """The default backend over bytes, each a token: for matching texts that no model wrote token by token."""
    vocabulary = TokenVocabulary(
        [bytes([byte]) for byte in range(_END)] + [b""],
        frozenset({_END}),
        (_END,),
        lambda text: list(text.encode()),
    )
    return load_backend("llguidance", vocabulary)


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text, as JSON Schema means it.

    Raises: GrammarError for a pattern that cannot be compiled.
    """
    # The grammar's strings have no raw delete, the one control character that JSON's need not escape.
    data = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    matcher = _matcher(pattern).copy()
    return matcher.accept(list(data.encode())) and matcher.is_finished()


@lru_cache(_MAX_PATTERNS)
def _matcher(pattern: str) -> GrammarMatcher:
    schema = {"type": "string", "pattern": pattern}
    return byte_backend().compile(Constraint("json", json.dumps(schema, ensure_ascii=False))).matcher
