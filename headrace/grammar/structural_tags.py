"""Structural tags: free text with constrained regions, as one grammar in llguidance's dialect of Lark.

Two spellings are read, both of xgrammar and vLLM: the short one, ``{"structures": [{"begin", "schema", "end"}],
"triggers": [...]}``, and the nested one, ``{"type": "structural_tag", "format": {"type": ..., ...}}``. A trigger that
shows up in the text starts one of the tags that begin with it; from there to its end the text is constrained.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import GrammarError

PARAM = "structured_outputs.structural_tag"
MAX_TAGS = 1024
MAX_DEPTH = 32
_ANY_TEXT = r"/(.|\n)*/"

SchemaText = Callable[[Any, str], str]


class StructuralTagGrammar:
    """Writes one structural tag as Lark.

    Args:
        schema_text: (a JSON schema, its path) -> the schema as it is to be compiled, as JSON text.
        special_ids: {text of a special token: its id}; where such a text stands in a tag, the token itself is meant.
    """

    def __init__(self, schema_text: SchemaText, special_ids: Mapping[str, int]) -> None:
        self._schema_text = schema_text
        self._special_ids = special_ids
        self._rules: list[str] = []
        self._serial = itertools.count()

    def write(self, document: Any) -> str:
        """The grammar. Raises GrammarError naming the path of what cannot be done."""
        if not isinstance(document, dict):
            raise _error("$", "must be an object")
        if "structures" in document or "triggers" in document:
            _check_fields(document, ("type", "structures", "triggers", *_FLAGS), "$")
            start = self._triggered(_from_short(document), "$", 0)
        else:
            form = document.get("format", document)
            if "format" in document:
                _check_fields(document, ("type", "format"), "$")
            start = self._format(form, "$.format" if "format" in document else "$", 0)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def _format(self, form: Any, path: str, depth: int) -> str:
        """The name of a rule that matches a format, or an expression that can stand in a sequence."""
        if depth > MAX_DEPTH:
            raise _error(path, f"is nested more than {MAX_DEPTH} levels deep")
        if not isinstance(form, dict):
            raise _error(path, "must be an object with a type")
        kind = form.get("type")
        writer = _FORMATS.get(kind) if isinstance(kind, str) else None
        if writer is None:
            raise _error(f"{path}.type", f"is {kind!r}; it must be one of {', '.join(sorted(_FORMATS))}")
        _check_fields(form, ("type", *_FIELDS[str(kind)]), path)
        return writer(self, form, path, depth + 1)

    def _text(self, form: dict[str, Any], path: str, depth: int) -> str:
        return self._literal(_string(form, "value", path))

    def _schema(self, form: dict[str, Any], path: str, depth: int) -> str:
        if "json_schema" not in form:
            raise _error(f"{path}.json_schema", "is missing")
        return self._rule(f"%json {self._schema_text(form['json_schema'], f'{path}.json_schema')}")

    def _regex(self, form: dict[str, Any], path: str, depth: int) -> str:
        pattern = _string(form, "pattern", path)
        return self._terminal(slashed(pattern))

    def _any_text(self, form: dict[str, Any], path: str, depth: int) -> str:
        return self._terminal(_ANY_TEXT)

    def _sequence(self, form: dict[str, Any], path: str, depth: int) -> str:
        return self._rule(" ".join(self._elements(form, path, depth)))

    def _either(self, form: dict[str, Any], path: str, depth: int) -> str:
        return self._rule(" | ".join(self._elements(form, path, depth)))

    def _elements(self, form: dict[str, Any], path: str, depth: int) -> list[str]:
        return [
            self._format(item, f"{path}.elements[{index}]", depth)
            for index, item in enumerate(_items(form, "elements", path))
        ]

    def _tag(self, form: dict[str, Any], path: str, depth: int) -> str:
        begin, content = self._literal(_string(form, "begin", path)), form.get("content")
        _check_fields(form, ("type", *_FIELDS["tag"]), path)
        end = _string(form, "end", path)
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return self._rule(f"{begin} {self._until(end)}")
        return self._rule(f"{begin} {self._format(content, f'{path}.content', depth)} {self._literal(end)}")

    def _triggered(self, form: dict[str, Any], path: str, depth: int) -> str:
        """Text in which a trigger starts one of the tags that begin with it."""
        triggers = _strings(form, "triggers", path)
        tags = _items(form, "tags", path)
        calls = []
        for trigger in triggers:
            rest = []
            for index, tag in enumerate(tags):
                begin = _string(tag, "begin", f"{path}.tags[{index}]")
                if begin.startswith(trigger):
                    rest.append(
                        self._tag({**tag, "begin": begin[len(trigger) :]}, f"{path}.tags[{index}]", depth)
                    )
            if not rest:
                raise _error(f"{path}.triggers", f"has {trigger!r}, with which no tag begins")
            calls.append(self._rule(f"{self._until(trigger)} {self._group(rest)}"))
        for index, tag in enumerate(tags):
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                raise _error(
                    f"{path}.tags[{index}].begin", f"is {tag['begin']!r}, which starts with no trigger"
                )
        return self._repeat(form, path, self._group(calls), self._terminal(_ANY_TEXT))

    def _repeat(self, form: dict[str, Any], path: str, call: str, after: str) -> str:
        """``call`` as often as the form allows, then ``after``."""
        is_needed, is_single = _flags(form, path)
        if is_single:
            return self._rule(call if is_needed else f"{call} | {after}")
        return self._rule(f"{call}{'+' if is_needed else '*'} {after}")

    def _separated(self, form: dict[str, Any], path: str, depth: int) -> str:
        tags = [
            self._tag(tag, f"{path}.tags[{index}]", depth)
            for index, tag in enumerate(_items(form, "tags", path))
        ]
        group = self._group(tags)
        is_needed, is_single = _flags(form, path)
        whole = (
            group if is_single else f"{group} ({self._literal(_string(form, 'separator', path))} {group})*"
        )
        return self._rule(whole if is_needed else f"({whole})?")

    def _until(self, end: str) -> str:
        """Any text up to the first ``end``, which belongs to it."""
        for name, token in self._special_ids.items():
            if end.startswith(name):
                rest = end[len(name) :]
                return f"{self._terminal(_ANY_TEXT)} <[{token}]> {self._literal(rest) if rest else ''}"
        return self._rule(f"{_ANY_TEXT} {json.dumps(end)}", "[lazy]")

    def _literal(self, text: str) -> str:
        """``text``, with the special tokens that are written out in it as such."""
        for name, token in self._special_ids.items():
            before, found, after = text.partition(name)
            if found:
                return f"{self._literal(before)} <[{token}]> {self._literal(after)}".strip()
        return json.dumps(text) if text else ""

    def _group(self, parts: list[str]) -> str:
        return f"({' | '.join(parts)})"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{next(self._serial)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{next(self._serial)}"
        self._rules.append(f"{name}: {body}")
        return name


_FORMATS: dict[str, Callable[[StructuralTagGrammar, dict[str, Any], str, int], str]] = {
    "const_string": StructuralTagGrammar._text,
    "json_schema": StructuralTagGrammar._schema,
    "regex": StructuralTagGrammar._regex,
    "any_text": StructuralTagGrammar._any_text,
    "sequence": StructuralTagGrammar._sequence,
    "or": StructuralTagGrammar._either,
    "tag": StructuralTagGrammar._tag,
    "triggered_tags": StructuralTagGrammar._triggered,
    "tags_with_separator": StructuralTagGrammar._separated,
}
_FLAGS = ("at_least_one", "stop_after_first")
# What each format has beside its type.
_FIELDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", *_FLAGS),
    "tags_with_separator": ("tags", "separator", *_FLAGS),
}


def slashed(pattern: str) -> str:
    """A regex between slashes, as Lark writes it."""
    escaped, is_escape = [], False
    for char in pattern:
        if char == "\n":
            char = "\\n" if not is_escape else "n"
        elif char == "/" and not is_escape:
            char = "\\/"
        is_escape = char == "\\" and not is_escape
        escaped.append(char)
    return f"/{''.join(escaped)}/"


def _from_short(document: dict[str, Any]) -> dict[str, Any]:
    tags = []
    for index, item in enumerate(_items(document, "structures", "$")):
        path = f"$.structures[{index}]"
        if not isinstance(item, dict):
            raise _error(path, "must be an object with begin, schema and end")
        _check_fields(item, ("begin", "schema", "end"), path)
        content = {"type": "json_schema", "json_schema": item.get("schema", {})}
        tags.append({"begin": item.get("begin"), "end": item.get("end", ""), "content": content})
    return {**document, "tags": tags}


def _error(path: str, problem: str) -> GrammarError:
    return GrammarError(f"structural_tag: {path} {problem}", param=PARAM, code="invalid_structural_tag")


def _check_fields(form: dict[str, Any], known: tuple[str, ...], path: str) -> None:
    for name in form:
        if name not in known:
            raise _error(path, f"has no field {str(name)!r:.100}; known: {', '.join(known)}")


def _flags(form: dict[str, Any], path: str) -> tuple[bool, bool]:
    """(is one tag needed, is one tag all), both no by default."""
    for name in _FLAGS:
        if not isinstance(form.get(name, False), bool):
            raise _error(f"{path}.{name}", "must be true or false")
    return form.get("at_least_one", False), form.get("stop_after_first", False)


def _string(form: dict[str, Any], name: str, path: str) -> str:
    value = form.get(name, "" if name == "end" else None) if isinstance(form, dict) else None
    if not isinstance(value, str) or (not value and name not in ("end", "begin", "separator")):
        raise _error(f"{path}.{name}", "must be a string")
    return value


def _items(form: dict[str, Any], name: str, path: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TAGS:
        raise _error(f"{path}.{name}", f"must be a list of 1 to {MAX_TAGS} entries")
    return value


def _strings(form: dict[str, Any], name: str, path: str) -> list[str]:
    for value in _items(form, name, path):
        if not isinstance(value, str) or not value:
            raise _error(f"{path}.{name}", "must hold non-empty strings")
    texts: list[str] = form[name]
    return texts
