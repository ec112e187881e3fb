"""A vocabulary of 50 tokens that can spell JSON, with merges over its seams, for tests without a model."""

from __future__ import annotations

from headrace.grammar.base import TokenVocabulary

TEXTS = [
    *'{}[]",:. 0123456789abcdefnlrstu-',
    '{"',
    '":',
    '",',
    '"}',
    '"a',
    'a"',
    "ab",
    "bc",
    "tr",
    "ue",
    "12",
    " 1",
    '": ',
    "\n",
    "é",
]
END = 49
SPECIAL = 48
TOKENS = [text.encode() for text in TEXTS] + [b""] * (SPECIAL - len(TEXTS)) + [b"<s>", b"</s>"]


def encode(text: str) -> list[int]:
    """Longest match first, from the left."""
    ids, data = [], text.encode()
    while data:
        token = max(
            (t for t, piece in enumerate(TOKENS[:SPECIAL]) if piece and data.startswith(piece)),
            key=lambda t: len(TOKENS[t]),
        )
        ids.append(token)
        data = data[len(TOKENS[token]) :]
    return ids


def decode(ids: list[int]) -> str:
    """Text of ids, the special ones left out."""
    return b"".join(TOKENS[token] for token in ids if token < SPECIAL).decode()


def small_vocabulary(end_ids: tuple[int, ...] = (END,)) -> TokenVocabulary:
    return TokenVocabulary(TOKENS, frozenset({SPECIAL, END}), end_ids, encode)


def bits(words) -> list[int]:
    """The tokens of one mask."""
    return [
        32 * index + bit for index, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1
    ]
