"""Constraints by the xgrammar library (https://github.com/mlc-ai/xgrammar): a pushdown automaton with masks worked out
beforehand. Optional, chosen by a request, and imported here alone.

It compiles JSON Schemas with words that it does not enforce, so a schema passes only if it is made of words that were
seen to be enforced; special tokens are taken out of every mask, since it takes the text of some for text.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from headrace.errors import GrammarError
from headrace.grammar.base import CompiledGrammar, GrammarMatcher, TokenVocabulary
from headrace.grammar.constraint_text import grammar_text
from headrace.grammar.unique_names import NameTokens, UniqueNamesMatcher, has_free_names
from headrace.structured_outputs import Constraint

_MAX_WHITESPACE = 2
_MAX_DEPTH = 64
_WORDS = frozenset(
    {
        *("type", "enum", "properties", "required", "additionalProperties", "items"),
        *("minItems", "maxItems", "minLength", "maxLength", "pattern", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum", "anyOf", "$ref", "$defs"),
    }
)


class XGrammarBackend:
    """Compiles with xgrammar.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        import xgrammar  # it brings torch, which nothing here needs before a request asks for it

        self._make_matcher = xgrammar.GrammarMatcher
        self._vocabulary = vocabulary
        info = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=list(vocabulary.end_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
        self._names = NameTokens(vocabulary)
        forbidden = vocabulary.special_ids - set(vocabulary.end_ids)
        forbidden |= {token for token, text in enumerate(vocabulary.tokens) if not text}
        self._text_mask = np.full(vocabulary.num_mask_words, 0xFFFFFFFF, np.uint32)
        for token in forbidden:
            self._text_mask[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile a constraint. Raises GrammarError."""
        param = f"structured_outputs.{constraint.kind}"
        try:
            compiled, has_names = self._compile(constraint)
        except RuntimeError as error:  # what the library raises for anything that it cannot read
            problem = str(error).strip().split("\n")[-1][:300]
            raise GrammarError(f"{param} cannot be compiled by xgrammar: {problem}", param=param) from None
        own = XGrammarMatcher(self._make_matcher(compiled), self._vocabulary, self._text_mask)
        matcher: GrammarMatcher = UniqueNamesMatcher(own, self._names) if has_names else own
        mask = np.zeros((1, self._vocabulary.num_mask_words), np.uint32)
        matcher.copy().fill_mask(mask, 0)
        if not mask.any():
            raise GrammarError(
                f"{param} accepts no text at all", param=param, code="constraint_accepts_nothing"
            )
        return CompiledGrammar(matcher, mask[0])

    def _compile(self, constraint: Constraint) -> tuple[Any, bool]:
        """(the library's grammar, whether objects may have names that are not listed)."""
        kind, text = constraint.kind, constraint.text
        if kind == "choice":
            rule = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            return self._compiler.compile_grammar(f"root ::= {rule}\n"), False
        if kind == "regex":
            return self._compiler.compile_regex(text), False
        form = grammar_text(constraint, {})
        if form.language == "gbnf":
            return self._compiler.compile_grammar(form.text), False
        if form.language == "lark":
            raise GrammarError(
                f"structured_outputs.{kind}: xgrammar reads GBNF only: leave `backend` out",
                param="structured_outputs.backend",
                code="unsupported_by_backend",
            )
        schema = json.loads(form.text)
        _check(schema, "#", 0)
        options: dict[str, Any] = {"any_whitespace": not constraint.is_compact, "strict_mode": False}
        if constraint.is_compact:
            options["separators"] = (",", ":")
        else:
            options["max_whitespace_cnt"] = _MAX_WHITESPACE
        return self._compiler.compile_json_schema(form.text, **options), has_free_names(schema)


class XGrammarMatcher:
    """A matcher over ``xgrammar.GrammarMatcher``."""

    def __init__(self, matcher: Any, vocabulary: TokenVocabulary, text_mask: np.ndarray) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._text_mask = text_mask

    def fill_mask(self, bitmask: np.ndarray, row: int) -> None:
        """See ``GrammarMatcher``."""
        own = np.full((1, len(self._text_mask)), -1, np.int32)
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(own, 0)
        bitmask[row] = own[0].view(np.uint32) & self._text_mask

    def accept(self, token_ids: list[int]) -> bool:
        """See ``GrammarMatcher``."""
        return all(self._matcher.accept_token(token) for token in token_ids)

    def forced_tokens(self) -> list[int]:
        """The last one is left out: the tokenizer may join it with what follows."""
        text = self._matcher.find_jump_forward_string()
        return self._vocabulary.encode(text)[:-1] if text else []

    def rollback(self, num_tokens: int) -> None:
        """See ``GrammarMatcher``."""
        self._matcher.rollback(num_tokens)

    def is_finished(self) -> bool:
        """See ``GrammarMatcher``."""
        return bool(self._matcher.is_completed())

    def is_complete(self) -> bool:
        """See ``GrammarMatcher``."""
        if not self.is_finished():
            return False
        mask = np.zeros((1, len(self._text_mask)), np.uint32)
        self.fill_mask(mask, 0)
        for token in self._vocabulary.end_ids:
            mask[0, token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        return not mask.any()

    def copy(self) -> GrammarMatcher:
        """See ``GrammarMatcher``."""
        return XGrammarMatcher(self._matcher.fork(), self._vocabulary, self._text_mask)


def _check(schema: Any, path: str, depth: int) -> None:
    """Refuse what the library would leave unenforced. Raises GrammarError naming the path."""
    if not isinstance(schema, dict):
        return
    for word in schema:
        if word not in _WORDS:
            _refuse(f"{path}/{word}", "is not enforced by xgrammar")
    if depth > _MAX_DEPTH:
        _refuse(path, "is nested too deeply for xgrammar")
    if '"' in schema.get("pattern", ""):
        _refuse(f"{path}/pattern", "has a quote, which breaks xgrammar's strings")
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        _refuse(f"{path}/pattern", "stands beside a length, which xgrammar drops")
    if "anyOf" in schema and len(schema) > 1 and set(schema) != {"anyOf", "$defs"}:
        _refuse(f"{path}/anyOf", "stands beside other words, which xgrammar does not join")
    if "$ref" in schema and set(schema) - {"$ref", "$defs"}:
        _refuse(f"{path}/$ref", "stands beside other words, which xgrammar does not join")
    kinds = schema.get("type")
    if "type" not in schema and not {"anyOf", "$ref", "enum"} & set(schema) and set(schema) - {"$defs"}:
        _refuse(path, "has no type, so that xgrammar guesses one")
    if isinstance(kinds, list) and set(schema) - {"type", "$defs"}:
        _refuse(f"{path}/type", "is a list beside other words, which xgrammar mixes up")
    if kinds == "number" and {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} & set(schema):
        _refuse(path, "bounds a number that need not be whole")
    for word in ("properties", "$defs"):
        for name, item in schema.get(word, {}).items():
            if item is False:
                _refuse(f"{path}/{word}/{name}", "forbids a property, which xgrammar does not enforce")
            _check(item, f"{path}/{word}/{name}", depth + 1)
    for index, item in enumerate(schema.get("anyOf", ())):
        _check(item, f"{path}/anyOf/{index}", depth + 1)
    for word in ("items", "additionalProperties"):
        _check(schema.get(word), f"{path}/{word}", depth + 1)


def _refuse(path: str, problem: str) -> None:
    raise GrammarError(
        f"schema {path}: {problem}: leave `backend` out to use the default",
        param="structured_outputs.backend",
        code="unsupported_by_backend",
    )
