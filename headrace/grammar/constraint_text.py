"""From a constraint to the text of a grammar: which language it is in, and what a backend is to compile."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import GrammarError
from headrace.grammar.structural_tags import StructuralTagGrammar
from headrace.structured_outputs import Constraint

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_CONTINUED = re.compile(r"\n[ \t]*\|")
# JSON strings inside a Lark file; a literal newline would end the rule.


@dataclass(frozen=True)
class GrammarText:
    """What a backend compiles.

    language: "json" (text is a JSON schema), "regex", "lark" or "gbnf".
    notes: what the constraint says and the grammar does not enforce.
    """

    language: Literal["json", "regex", "lark", "gbnf"]
    text: str
    notes: list[str] = field(default_factory=list)


def grammar_text(constraint: Constraint, special_ids: Mapping[str, int]) -> GrammarText:
    """The grammar of a constraint.

    Args:
        special_ids: {text of a special token: its id}, for structural tags.

    Raises: GrammarError naming the path of what cannot be done.
    """
    kind, text = constraint.kind, constraint.text
    if kind == "json":
        return _schema(text)
    if kind == "json_object":
        return GrammarText("json", '{"type":"object"}')
    if kind == "choice":
        return GrammarText("lark", "start: " + " | ".join(json.dumps(choice) for choice in json.loads(text)))
    if kind == "regex":
        return GrammarText("regex", text)
    if kind == "grammar":
        is_gbnf = _GBNF_RULE.search(text) is not None
        return GrammarText("gbnf", _CONTINUED.sub(" |", text)) if is_gbnf else GrammarText("lark", text)
    notes: list[str] = []

    def schema_text(schema: Any, path: str) -> str:
        lowered = _schema(json.dumps(schema), path)
        notes.extend(lowered.notes)
        return lowered.text

    return GrammarText("lark", StructuralTagGrammar(schema_text, special_ids).write(json.loads(text)), notes)


def _schema(text: str, path: str = "$") -> GrammarText:
    schema = json.loads(text)
    if schema is False:
        raise GrammarError(
            f"{path}: the schema is false: it accepts nothing", code="constraint_accepts_nothing"
        )
    return GrammarText("json", "{}" if schema is True else text)
