"""From a constraint to the text of a grammar: which language it is in, and what a backend is to compile."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headrace.errors import GrammarError
from headrace.grammar.json_schema import lower_schema
from headrace.grammar.structural_tags import PARAM, StructuralTagGrammar
from headrace.structured_outputs import Constraint

WHITESPACE = r"( |\r?\n[ \t]{0,32})?"
"""Between JSON's tokens: bounded, since models are known to run on in it."""
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_MAX_ALTERNATIVES = 1000
_CONTINUED = re.compile(r"\n[ \t]*\|")


@dataclass(frozen=True)
class GrammarText:
    """What a backend compiles.

    language: "json" (text is a JSON schema), "regex", "lark" or "gbnf".
    """

    language: Literal["json", "regex", "lark", "gbnf"]
    text: str


def prepare(constraint: Constraint) -> tuple[Constraint, list[str]]:
    """(a constraint whose schema is brought to the words that grammars know, what the schema says and nobody enforces).

    Needs no library. Raises: GrammarError naming the path of what cannot be done.
    """
    if constraint.kind != "json" or constraint.source:
        return constraint, []
    lowered, notes = lower_schema(json.loads(constraint.text))
    text = json.dumps(lowered, ensure_ascii=False, separators=(",", ":"))
    return msgspec.structs.replace(constraint, text=text, source=constraint.text), notes


def grammar_text(constraint: Constraint, special_ids: Mapping[str, int]) -> GrammarText:
    """The grammar of a constraint.

    Args:
        special_ids: {text of a special token: its id}, for structural tags.

    Raises: GrammarError naming the path of what cannot be done.
    """
    kind, text = constraint.kind, constraint.text
    if kind == "json":
        return GrammarText("json", prepare(constraint)[0].text)
    if kind == "json_object":
        return GrammarText("json", '{"type":"object"}')
    if kind == "choice":
        choices = json.loads(text)
        # The parser has room for so many alternatives; more are one lexeme.
        start = "start: " if len(choices) <= _MAX_ALTERNATIVES else "start: CHOICE\nCHOICE: "
        return GrammarText("lark", start + " | ".join(map(json.dumps, choices)))
    if kind == "regex":
        return GrammarText("regex", text)
    if kind == "grammar":
        is_gbnf = _GBNF_RULE.search(text) is not None
        return GrammarText("gbnf", _CONTINUED.sub(" |", text)) if is_gbnf else GrammarText("lark", text)
    return GrammarText("lark", StructuralTagGrammar(_tag_schema, special_ids).write(json.loads(text)))


def _tag_schema(schema: Any, path: str) -> str:
    """A schema inside a structural tag, on one line."""
    try:
        own = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
        return json.dumps({**lower_schema(schema)[0], "x-guidance": own}, ensure_ascii=False)
    except GrammarError as error:
        raise GrammarError(f"structural_tag: {path}: {error.message}", param=PARAM, code=error.code) from None
