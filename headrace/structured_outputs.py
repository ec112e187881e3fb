"""What an answer's text must be: a JSON document, a match of a regex or a grammar, one of several texts.

``StructuredOutputsParams`` is what users write (vLLM's names); ``Constraint`` is the same brought to one form, which
travels to the engine core and is the key of its cache of compiled grammars.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from headrace.errors import GrammarError, RequestError
from headrace.names import NamedFields

MAX_CONSTRAINT_BYTES = 1 << 20
MAX_CHOICES = 10_000
BACKENDS = ("llguidance", "xgrammar")
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_SHOWN_CHARS = 80

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """One constraint, ready to be compiled. Equal constraints have equal fields, so it is its own cache key.

    text: the JSON schema, the choices or the structural tag as JSON text (member order kept); the regex; the grammar in
        Lark's or GBNF's spelling; empty for ``json_object``.
    backend: the library that compiles it.
    is_compact: JSON without any whitespace between its tokens.
    source: the schema as it was given, where ``text`` is a rewriting of it.
    """

    kind: Kind
    text: str
    backend: str = "llguidance"
    is_compact: bool = False
    source: str = ""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, kw_only=True, metaclass=NamedFields):
    """What the answer must be; exactly one of the first six is set.

    json: a JSON Schema, as an object (a dict) or as its text. The answer is a document that it accepts.
    regex: the whole answer matches it.
    choice: the answer is one of these texts.
    grammar: the answer is a sentence of this grammar, in Lark's EBNF or in llama.cpp's GBNF.
    json_object: True asks for any JSON object.
    structural_tag: free text with constrained regions (tool calls, say); see docs/structured.md.
    disable_any_whitespace: JSON without whitespace between its tokens.
    backend: "llguidance" (the default) or "xgrammar", which must be installed.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check every field. Raises RequestError naming the field, GrammarError for a constraint nobody can read."""
        self.to_constraint()

    def to_constraint(self) -> Constraint:
        """The form that travels. Raises as ``verify`` does."""
        kind = self._kind()
        if not isinstance(self.disable_any_whitespace, bool):
            raise _refusal("disable_any_whitespace", self.disable_any_whitespace, "True or False")
        if self.backend is not None and self.backend not in BACKENDS:
            raise _refusal("backend", self.backend, f"one of {', '.join(BACKENDS)}")
        text = _TEXT_OF[kind](getattr(self, kind))
        size = _size_bytes(kind, text)
        if size > MAX_CONSTRAINT_BYTES:
            raise GrammarError(
                f"structured_outputs.{kind} has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are allowed: simplify it",
                param=_param(kind),
                code="constraint_too_large",
            )
        return Constraint(kind, text, self.backend or BACKENDS[0], self.disable_any_whitespace)

    def _kind(self) -> Kind:
        """The one field that is set. ``json_object`` False asks for nothing."""
        given: list[Kind] = [kind for kind in KINDS if getattr(self, kind) is not None]  # type: ignore[misc]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}; {found}",
                param="structured_outputs",
            )
        return given[0]


def _size_bytes(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(
            f"structured_outputs.{name} has a lone surrogate (at character {error.start}), which no text can hold: "
            "remove it",
            param=_param(name),
        ) from None


def _json_text(name: str, value: Any) -> str:
    """A schema or a tag as JSON text, whatever form it was given in."""
    try:
        document = json.loads(value) if isinstance(value, str) else value
        if not isinstance(document, dict | bool):
            raise _refusal(name, value, "a JSON object")
        return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise GrammarError(
            f"structured_outputs.{name} is nested too deeply to be read: make it flatter",
            param=_param(name),
            code="constraint_too_deep",
        ) from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"structured_outputs.{name} is not JSON: {error}", param=_param(name)) from None


def _schema_text(value: Any) -> str:
    return _json_text("json", value)


def _tag_text(value: Any) -> str:
    if isinstance(value, bool):
        raise _refusal("structural_tag", value, "an object or its JSON text")
    return _json_text("structural_tag", value)


def _regex_text(value: Any) -> str:
    return _plain_text("regex", value)


def _grammar_text(value: Any) -> str:
    return _plain_text("grammar", value)


def _plain_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _refusal(name, value, "a non-empty string")
    return value


def _choice_text(value: Any) -> str:
    if not isinstance(value, list) or not value:
        raise _refusal("choice", value, "a list of at least one string")
    if len(value) > MAX_CHOICES:
        raise RequestError(
            f"structured_outputs.choice has {len(value)} texts; at most {MAX_CHOICES} are allowed",
            param=_param("choice"),
        )
    for text in value:
        if not isinstance(text, str) or not text:
            raise _refusal("choice", text, "a list of non-empty strings", "the item ")
    return json.dumps(value, ensure_ascii=False)


def _object_text(value: Any) -> str:
    if value is not True:
        raise _refusal("json_object", value, "True or False")
    return ""


_TEXT_OF = {
    "json": _schema_text,
    "regex": _regex_text,
    "choice": _choice_text,
    "grammar": _grammar_text,
    "json_object": _object_text,
    "structural_tag": _tag_text,
}


def _param(name: str) -> str:
    return f"structured_outputs.{name}"


def _refusal(name: str, value: Any, wanted: str, where: str = "") -> RequestError:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):
        shown = f"a {type(value).__name__}"
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"
    return RequestError(f"structured_outputs.{name} must be {wanted}; got {where}{shown}", param=_param(name))
