"""Plain-Python tokenizers, written from the algorithms' definitions, to check the fast ones against."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Mapping, Sequence

WHITE_SPACE = set("\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {
    chr(c) for c in range(0x2000, 0x200B)
}
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def kind_of(char: str) -> str:
    if char in WHITE_SPACE:
        return "space"
    category = unicodedata.category(char)[0]
    return {"L": "letter", "N": "number"}.get(category, "other")


def gpt2_words(text: str) -> list[str]:
    """GPT-2's splitting rule as a scanner: contraction, [space] letters / numbers / others, white space."""
    words, at = [], 0
    while at < len(text):
        end = next((at + len(c) for c in CONTRACTIONS if text.startswith(c, at)), 0)
        if not end:
            start = (
                at + 1 if text[at] == " " and at + 1 < len(text) and kind_of(text[at + 1]) != "space" else at
            )
            kind, end = kind_of(text[start]), start
            while end < len(text) and kind_of(text[end]) == kind:
                end += 1
            # White space before a word leaves its last character to the word, unless it is all there is.
            if kind == "space" and end < len(text) and end - at > 1:
                end -= 1
        words.append(text[at:end])
        at = end
    return words


def split_digits(text: str) -> list[str]:
    """Numbers one by one, what lies between as it is."""
    pieces: list[str] = []
    for char in text:
        is_number = kind_of(char) == "number"
        if is_number or not pieces or kind_of(pieces[-1][0]) == "number":
            pieces.append(char)
        else:
            pieces[-1] += char
    return pieces


def byte_alphabet() -> dict[int, str]:
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table, extra = {byte: chr(byte) for byte in shown}, 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


class BytePairOracle:
    """Byte-level BPE with digits apart, as the ``smollm`` pre-tokenizer says."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], special: Mapping[str, int]) -> None:
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = special
        self.alphabet = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in partition(text, self.special):
            if part in self.special:
                ids.append(self.special[part])
                continue
            for piece in split_digits(part):
                for word in gpt2_words(piece):
                    ids += self.merge(word)
        return ids

    def merge(self, word: str) -> list[int]:
        symbols = [self.alphabet[byte] for byte in word.encode()]
        while len(symbols) > 1:
            ranked = [
                (self.ranks[pair], at)
                for at, pair in enumerate(itertools.pairwise(symbols))
                if pair in self.ranks
            ]
            if not ranked:
                break
            at = min(ranked)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]


class SentencePieceOracle:
    """SentencePiece's BPE by scores with byte fallback and user-defined symbols."""

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        *,
        bos: int | None,
        has_prefix: bool,
    ) -> None:
        self.tokens = tokens
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.scores = {token: scores[i] for i, token in enumerate(tokens) if types[i] == 1}
        self.marked = {token: index for index, token in enumerate(tokens) if types[index] in (2, 3, 4)}
        self.bos, self.has_prefix = bos, has_prefix

    def encode(self, text: str) -> list[int]:
        ids = [] if self.bos is None else [self.bos]
        for part in partition(text, self.marked):
            if part in self.marked:
                ids.append(self.marked[part])
            else:
                ids += self.merge(("▁" if self.has_prefix else "") + part.replace(" ", "▁"))
        return ids

    def merge(self, text: str) -> list[int]:
        symbols = list(text)
        while len(symbols) > 1:
            best, best_at = None, -1
            for at in range(len(symbols) - 1):
                score = self.scores.get(symbols[at] + symbols[at + 1])
                if score is not None and (best is None or score > best):
                    best, best_at = score, at
            if best is None:
                break
            symbols[best_at : best_at + 2] = [symbols[best_at] + symbols[best_at + 1]]
        ids: list[int] = []
        for symbol in symbols:
            if symbol in self.ids:
                ids.append(self.ids[symbol])
            else:
                ids += [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return ids


def partition(text: str, marked: Mapping[str, int]) -> list[str]:
    """Cuts out marked tokens, leftmost first and longest of those."""
    by_first: dict[str, list[str]] = {}
    for token in sorted(marked, key=len, reverse=True):
        by_first.setdefault(token[0], []).append(token)
    parts, start, at = [], 0, 0
    while at < len(text):
        found = next((token for token in by_first.get(text[at], ()) if text.startswith(token, at)), None)
        if found is None:
            at += 1
            continue
        parts += [text[start:at], found] if at > start else [found]
        at += len(found)
        start = at
    return [*parts, text[start:]] if start < len(text) else parts
