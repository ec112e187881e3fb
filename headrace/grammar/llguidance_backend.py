"""Constraints by the llguidance library (https://github.com/guidance-ai/llguidance): an Earley parser over a lexer of
regex derivatives, which walks a trie of the vocabulary for each mask. The default backend; imported here alone.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import llguidance
import numpy as np

from headrace.errors import GrammarError
from headrace.grammar.base import CompiledGrammar, TokenVocabulary
from headrace.grammar.constraint_text import WHITESPACE, GrammarText, grammar_text
from headrace.grammar.json_schema.objects import MAX_OPTIONAL
from headrace.grammar.llguidance_errors import why_not_compiled
from headrace.grammar.unique_names import NameTokens, UniqueNamesMatcher, has_free_names
from headrace.structured_outputs import Constraint

# A row has four items for each member that may come next, and the time of a mask there grows with the square of that:
# 50 ms at a thousand members.
_MAX_ITEMS_IN_ROW = 4 * MAX_OPTIONAL + 96
_LIMITS: dict[str, Any] = {
    "max_items_in_row": _MAX_ITEMS_IN_ROW,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# What may hold a "<" that is none: strings, comments, regular expressions. The rest are references to tokens.
_TOKEN_REFERENCE = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^\s>]*>?)')
_NOT_ALLOWED = "doesn't satisfy the grammar"  # the library's words; its other errors are limits


class LLGuidanceBackend:
    """Compiles with llguidance. Its tries are built once here, in some tenths of a second.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._vocabulary = vocabulary
        # With no end of text known, a token past the vocabulary plays it: its bit is cut off with the last word.
        self._end_ids = list(vocabulary.end_ids) or [len(vocabulary.tokens)]
        self._num_tokens = max(len(vocabulary.tokens), self._end_ids[-1] + 1)
        wrapped = llguidance.TokenizerWrapper(_Tokens(vocabulary, self._end_ids[0], self._num_tokens))
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=self._num_tokens, eos_token=self._end_ids)
        names = {vocabulary.tokens[token]: token for token in sorted(vocabulary.special_ids)}
        self._special_names = {name.decode(): token for name, token in names.items() if name}
        self._limits = llguidance.LLParserLimits(**_LIMITS)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile a constraint. Raises GrammarError."""
        text = grammar_text(constraint, self._special_names)
        matcher = LLGuidanceMatcher(
            llguidance.LLMatcher(
                self._tokenizer, self._spell(text, constraint), log_level=0, limits=self._limits
            ),
            self._end_ids,
            self._num_tokens,
        )
        if matcher.error:
            reason = self._where(constraint) + why_not_compiled(
                matcher.report, "gbnf" if text.language == "gbnf" else constraint.kind
            )
            raise GrammarError(
                f"structured_outputs.{constraint.kind} cannot be compiled: {reason}",
                param=f"structured_outputs.{constraint.kind}",
                code="constraint_not_compiled",
            )
        first_mask = self._first_mask(matcher, constraint)
        if text.language == "json":
            self._try_object(matcher)
        if text.language == "json" and has_free_names(json.loads(text.text)):
            return CompiledGrammar(UniqueNamesMatcher(matcher, self._name_tokens), first_mask)
        return CompiledGrammar(matcher, first_mask)

    def _where(self, constraint: Constraint) -> str:
        """The place of the first pattern of a schema that the library does not know, which its errors do not tell."""
        if constraint.kind != "json":
            return ""
        for path, pattern in patterns_of(json.loads(constraint.source or constraint.text), "#"):
            grammar = llguidance.LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
            if llguidance.LLMatcher.validate_grammar(grammar, limits=self._limits):
                return f"schema {path}: "
        return "schema #: "

    @cached_property
    def _name_tokens(self) -> NameTokens:
        return NameTokens(self._vocabulary)

    def _first_mask(self, matcher: LLGuidanceMatcher, constraint: Constraint) -> np.ndarray:
        mask = np.zeros((1, self._vocabulary.num_mask_words), np.uint32)
        probe = matcher.copy()
        # With no way to go on, the library reports an error in place of an empty mask.
        with contextlib.suppress(GrammarError):
            probe.fill_mask(mask, 0)
        if not mask.any():
            raise GrammarError(
                f"structured_outputs.{constraint.kind} accepts no text at all",
                param=f"structured_outputs.{constraint.kind}",
                code="constraint_accepts_nothing",
            )
        first: np.ndarray = mask[0]
        return first

    def _try_object(self, matcher: LLGuidanceMatcher) -> None:
        """Begin an object, where alternatives and conjunctions add up to more members than the library follows.

        Raises: GrammarError.
        """
        brace = self._vocabulary.encode("{")
        probe = matcher.copy()
        if probe.may_accept(brace):
            try:
                probe.accept(brace)
            except GrammarError as error:
                problem = (
                    f"schema #: {error.message}: allow fewer optional properties, at most {MAX_OPTIONAL}"
                )
                raise GrammarError(problem, param="structured_outputs.json", code=error.code) from None

    def _spell(self, text: GrammarText, constraint: Constraint) -> str:
        """The grammar in llguidance's own form."""
        make: Any = llguidance.LLMatcher
        if text.language == "json":
            spelled: str = make.grammar_from_json_schema(
                text.text, overrides=json_options(constraint.is_compact)
            )
        elif text.language == "regex":
            spelled = make.grammar_from_regex(text.text)
        else:
            lark = _from_gbnf(text.text) if text.language == "gbnf" else text.text
            if constraint.kind == "grammar":
                _refuse_token_references(lark)
            spelled = make.grammar_from_lark(lark)
        return spelled


class LLGuidanceMatcher:
    """A matcher over ``llguidance.LLMatcher``."""

    def __init__(self, matcher: Any, end_ids: list[int], num_tokens: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._ends = [(token >> 5, np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))) for token in end_ids]
        self._num_words = -(-num_tokens // 32)

    @property
    def report(self) -> str:
        """Why the matcher is of no use, or "", at the library's length."""
        text: str = self._matcher.get_error()
        return text

    @property
    def error(self) -> str:
        """The first line of ``report``."""
        return self.report.strip().split("\n")[0]

    def fill_mask(self, bitmask: np.ndarray, row: int) -> None:
        """See ``GrammarMatcher``."""
        own = bitmask[row]
        words = (
            own
            if len(own) == self._num_words and own.flags.c_contiguous
            else np.zeros(self._num_words, np.uint32)
        )
        self._matcher.unsafe_compute_mask_ptr(words.__array_interface__["data"][0], words.nbytes)
        if self._matcher.is_error():
            own[:] = 0
            raise self._too_complex()
        if (
            not self._matcher.is_accepting()
        ):  # where nothing can follow, the library allows an end all the same
            for word, others in self._ends:
                words[word] &= others
        if words is not own:
            own[:] = words[: len(own)]

    def accept(self, token_ids: list[int]) -> bool:
        """See ``GrammarMatcher``."""
        if self._matcher.consume_tokens(token_ids):
            return True
        if _NOT_ALLOWED not in self.error:
            raise self._too_complex()
        return False

    def may_accept(self, token_ids: list[int]) -> bool:
        """True if these tokens may come next. Advances nothing."""
        return bool(self._matcher.validate_tokens(token_ids) == len(token_ids))

    def _too_complex(self) -> GrammarError:
        return GrammarError(
            f"the constraint is too complex at this place: {self.error}", code="constraint_too_complex"
        )

    def forced_tokens(self) -> list[int]:
        """See ``GrammarMatcher``."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def rollback(self, num_tokens: int) -> None:
        """See ``GrammarMatcher``."""
        self._matcher.rollback(num_tokens)

    def is_finished(self) -> bool:
        """See ``GrammarMatcher``."""
        return bool(self._matcher.is_accepting())

    def is_complete(self) -> bool:
        """See ``GrammarMatcher``."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def copy(self) -> LLGuidanceMatcher:
        """See ``GrammarMatcher``."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._end_ids, 32 * self._num_words)


class _Tokens:
    """The vocabulary in the form that ``llguidance.TokenizerWrapper`` reads."""

    def __init__(self, vocabulary: TokenVocabulary, end_id: int, num_tokens: int) -> None:
        hidden = vocabulary.special_ids | set(vocabulary.end_ids)
        self.eos_token_id = end_id
        self.bos_token_id = None
        # A token without text still needs a name of its own: two alike would be one entry of the trie.
        self.tokens = [text or f"<|{token}|>".encode() for token, text in enumerate(vocabulary.tokens)]
        nameless = {token for token, text in enumerate(vocabulary.tokens) if not text}
        extra = range(len(self.tokens), num_tokens)
        self.tokens += [f"<|{token}|>".encode() for token in extra]
        self.special_token_ids = sorted(hidden | nameless | set(extra))
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text)


def patterns_of(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, regex) of every pattern in a schema."""
    if isinstance(schema, dict):
        for word, value in schema.items():
            if word == "pattern" and isinstance(value, str):
                yield f"{path}/pattern", value
            elif word == "patternProperties" and isinstance(value, dict):
                yield from ((f"{path}/patternProperties/{name}", name) for name in value)
            yield from patterns_of(value, f"{path}/{word}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from patterns_of(value, f"{path}/{index}")


def json_options(is_compact: bool) -> dict[str, Any]:
    """llguidance's options for JSON."""
    if is_compact:
        return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    return {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}


def _refuse_token_references(lark: str) -> None:
    """A grammar describes text; what a token without text stands for could not be seen in the answer.

    Raises: GrammarError naming the first reference.
    """
    for match in _TOKEN_REFERENCE.finditer(lark):
        if match[1] is not None:
            line = lark.count("\n", 0, match.start()) + 1
            raise GrammarError(
                f"structured_outputs.grammar line {line}: {match[1][:60]!r} refers to tokens, which an answer's text "
                "does not show: write the text, or use a structural tag",
                param="structured_outputs.grammar",
                code="constraint_not_compiled",
            )


def _from_gbnf(text: str) -> str:
    """llama.cpp's spelling in Lark's. Raises GrammarError for what cannot be read."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # the library raises several classes of its own for text that it cannot read
        raise GrammarError(
            f"structured_outputs.grammar cannot be read as GBNF: {error}",
            param="structured_outputs.grammar",
            code="constraint_not_compiled",
        ) from None
    return lark
