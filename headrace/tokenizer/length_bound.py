"""LengthBound: how many tokens a text has at least, without encoding it.

Encoding takes about a second per megabyte; a prompt that is many times too long can be refused in a millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.tokenizer.byte_alphabet import BYTE_TO_CHAR
from headrace.tokenizer.token_bytes import DecodingRules, PieceKind

if TYPE_CHECKING:
    import tokenizers

# Composing makes at most one character of four (a Greek vowel with three marks); Hangul makes one of three.
_NFC_SHRINKS = 4
_KEEPING_CUTS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
_ASCII, _CONTINUATIONS = range(0x80), range(0x80, 0xC0)


class LengthBound:
    """The longest token's bytes bound the number of tokens from below, where no step swallows text."""

    def __init__(self, backend: tokenizers.Tokenizer, rules: DecodingRules) -> None:
        """Reads the whole vocabulary: 20 ms for 50,000 tokens."""
        self._max_chars_per_token = 0
        self._lost: list[str] = []
        shrinking = _normaliser_shrinking(_steps(backend.normalizer, "normalizers"))
        if not shrinking or not _keeps_all_text(backend, rules):
            return
        is_byte_level = rules.kind is PieceKind.BYTE_LEVEL
        pieces = backend.get_vocab(with_added_tokens=True)
        longest = max(map(len, pieces)) if is_byte_level else max(len(piece.encode()) for piece in pieces)
        added = [len(token.content.encode()) for token in backend.get_added_tokens_decoder().values()]
        self._max_chars_per_token = max([longest, *added]) * shrinking
        if is_byte_level:
            # The library drops bytes that a vocabulary lacks; published ones lack a few control characters.
            self._lost = [chr(byte) for byte in _ASCII if BYTE_TO_CHAR[byte] not in pieces]

    def min_num_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` surely has; 0 where nothing is sure."""
        if not self._max_chars_per_token:
            return 0
        # Every other character keeps at least one of its bytes.
        return (len(text) - sum(map(text.count, self._lost))) // self._max_chars_per_token


def _steps(part: Any, name: str) -> list[Mapping[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, in order, as in tokenizer.json."""
    if part is None:
        return []

    def flatten(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if step.get("type") != "Sequence":
            return [step]
        return [inner for item in step.get(name, []) for inner in flatten(item)]

    return flatten(json.loads(part.__getstate__()))


def _normaliser_shrinking(steps: list[Mapping[str, Any]]) -> int:
    """How many bytes may become one; 0 when a step is unknown."""
    shrinking = 1
    for step in steps:
        pattern = step.get("pattern", {}).get("String", "")
        if step["type"] == "NFC":
            shrinking = _NFC_SHRINKS
        elif step["type"] == "Replace" and 0 < len(pattern.encode()) <= len(step.get("content", "").encode()):
            continue
        elif step["type"] != "Prepend":
            return 0
    return shrinking


def _keeps_all_text(backend: tokenizers.Tokenizer, rules: DecodingRules) -> bool:
    """Whether every character of a normalised text leaves its mark, and no token takes in more than its own text."""
    cuts = _steps(backend.pre_tokenizer, "pretokenizers")
    if any(step["type"] not in _KEEPING_CUTS or step.get("behavior") == "Removed" for step in cuts):
        return False
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return False
    if type(backend.model).__name__ != "BPE":
        return False
    if rules.kind is PieceKind.BYTE_LEVEL:
        alphabet = [BYTE_TO_CHAR[byte] for byte in _CONTINUATIONS]
    elif rules.has_byte_tokens:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return False
    return all(backend.token_to_id(piece) is not None for piece in alphabet)
