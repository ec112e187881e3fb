"""Regexes for sets of strings and for all strings but some."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ANY = r"[\s\S]"


def one_of(texts: Iterable[str]) -> str:
    """A regex of exactly these texts."""
    return f"^({'|'.join(escaped(text) for text in texts)})$"


def none_of(texts: Iterable[str]) -> str:
    """A regex of all strings but these: it follows their trie, and leaves it by a character that no branch has."""
    root: dict[str, object] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})  # type: ignore[assignment]
        node[""] = True
    return f"^{_outside(root)}$"


def _outside(node: dict[str, object]) -> str:
    """All strings that, read from this place of the trie, are none of its texts."""
    chars = [char for char in node if char]
    if not chars:
        return f"({_ANY}+)" if "" in node else f"({_ANY}*)"
    others = f"[^{''.join(_in_class(char) for char in chars)}]{_ANY}*"
    branches = [f"{escaped(char)}{_outside(node[char])}" for char in chars]  # type: ignore[arg-type]
    parts = "|".join([others, *branches])
    return f"({parts})" if "" in node else f"({parts})?"


def escaped(text: str) -> str:
    """``text`` as a regex that matches it alone."""
    return re.sub(r"[\\^$.|?*+()\[\]{}/-]", lambda found: "\\" + found[0], text).replace("\n", "\\n")


def _in_class(char: str) -> str:
    return "\\n" if char == "\n" else "\\" + char if char in "\\^]-[" else char
