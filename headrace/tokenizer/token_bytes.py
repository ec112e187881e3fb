"""What bytes each token stands for: the table that decoding and streaming are built on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headrace.errors import UnsupportedModelError
from headrace.tokenizer.byte_alphabet import CHAR_TO_BYTE

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceKind(Enum):
    """How a vocabulary writes bytes: GPT-2's byte alphabet, or text with a space mark and byte tokens."""

    BYTE_LEVEL = "byte_level"
    SENTENCEPIECE = "sentencepiece"


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """How pieces become text.

    Attributes:
        kind: how pieces write bytes.
        strips_first_space: whether a space at the very start of the text is dropped, because encoding adds one.
        has_byte_tokens: whether ``<0x0A>`` stands for a byte (SentencePiece kind).
        space_mark: the character that stands for a space (SentencePiece kind).
    """

    kind: PieceKind
    strips_first_space: bool = False
    has_byte_tokens: bool = True
    space_mark: str = "\u2581"


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, worked out on first use. Ids without a token, and the hidden ones, give b""."""

    def __init__(
        self,
        rules: DecodingRules,
        id_to_piece: Callable[[int], str | None],
        added: Mapping[int, str],
        hidden: frozenset[int],
        vocab_size: int,
    ) -> None:
        super().__init__()
        self._rules, self._id_to_piece, self._added, self._hidden = rules, id_to_piece, added, hidden
        self._vocab_size = vocab_size

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._vocab_size:
            return b""
        value = self._work_out(token_id)
        self[token_id] = value
        return value

    def _work_out(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        literal = self._added.get(token_id)
        piece = literal if literal is not None else self._id_to_piece(token_id)
        if piece is None:
            return b""
        if self._rules.kind is PieceKind.BYTE_LEVEL:
            # Added tokens are matched in the text itself, so they stand for their own characters.
            return piece.encode() if literal is not None else byte_level_bytes(piece)
        found = _BYTE_TOKEN.fullmatch(piece) if self._rules.has_byte_tokens else None
        if found:
            return bytes.fromhex(found[1])
        return piece.replace(self._rules.space_mark, " ").encode()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a piece in GPT-2's alphabet; a piece with any other character stands for its own UTF-8."""
    try:
        return bytes([CHAR_TO_BYTE[char] for char in piece])
    except KeyError:
        return piece.encode()


def rules_from_decoder(decoder: Mapping[str, Any] | None, where: str) -> DecodingRules:
    """The rules that the ``decoder`` section of a tokenizer.json describes.

    Raises:
        UnsupportedModelError: it is of a kind that decoder-only models do not use; the message names it.
    """
    steps = _flatten(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodingRules(PieceKind.BYTE_LEVEL)
    if kinds == ["Metaspace"]:
        step = steps[0]
        strips = (
            step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
        )
        return DecodingRules(
            PieceKind.SENTENCEPIECE,
            strips,
            has_byte_tokens=False,
            space_mark=step.get("replacement", "\u2581"),
        )
    if kinds and kinds[0] == "Replace" and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _sentencepiece_rules(steps, where)
    raise UnsupportedModelError(
        f"{where}: a tokenizer with the decoder {json.dumps(decoder)[:200]} is not supported "
        "(known: ByteLevel, Metaspace, and Replace with ByteFallback, Fuse, Strip)"
    )


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]


def _sentencepiece_rules(steps: list[Mapping[str, Any]], where: str) -> DecodingRules:
    replaces = [step for step in steps if step["type"] == "Replace"]
    strips = [step for step in steps if step["type"] == "Strip"]
    mark = replaces[0].get("pattern", {}).get("String")
    fits_strip = all(
        (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0) for step in strips
    )
    if (
        len(replaces) > 1
        or replaces[0].get("content") != " "
        or not mark
        or len(strips) > 1
        or not fits_strip
    ):
        raise UnsupportedModelError(
            f"{where}: a tokenizer with the decoder {json.dumps(steps)[:300]} is not supported"
        )
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)
    return DecodingRules(PieceKind.SENTENCEPIECE, bool(strips), has_byte_tokens=has_bytes, space_mark=mark)
