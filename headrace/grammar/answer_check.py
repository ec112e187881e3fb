"""AnswerCheck: whether a finished answer is what its constraint asked for, told from its text alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from typing import Any

from headrace.errors import GrammarError
from headrace.grammar.base import GrammarMatcher
from headrace.grammar.json_schema.validation import validator_of
from headrace.grammar.patterns import byte_backend
from headrace.structured_outputs import Constraint

_MAX_CHECKS = 64


class AnswerChecks:
    """The checks of recent constraints, and how many answers failed theirs.

    num_violations: whole answers that were not what their constraint asked for. It stays 0 while masks are right.
    """

    def __init__(self) -> None:
        self._make = lru_cache(_MAX_CHECKS)(AnswerCheck)
        self.num_violations = 0

    def of(self, constraint: Constraint) -> AnswerCheck:
        """The check of a constraint; schemas are prepared once."""
        return self._make(constraint)


class AnswerCheck:
    """Checks answers against one constraint, independently of the masks that they were sampled under.

    JSON is parsed and put to the jsonschema package; a choice is looked up; other texts run through their grammar once
    more, byte by byte.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    @property
    def is_self_ending(self) -> bool:
        """True if the grammar knows where the answer ends, so that stop strings have nothing to say."""
        return self._constraint.kind in ("json", "json_object", "choice")

    def mentions(self, texts: Iterable[str]) -> bool:
        """True if one of these special tokens stands in the constraint, which only means them in structural tags."""
        tag = self._constraint.text
        return self._constraint.kind == "structural_tag" and any(text and text in tag for text in texts)

    def end_finder(self) -> EndFinder:
        """Tells, for one answer, where it may end."""
        return EndFinder(lambda: None if self._byte_matcher is None else self._byte_matcher.copy())

    def problem(self, text: str) -> str | None:
        """Why ``text`` is not what was asked for, or None. Raises nothing: what cannot be checked is a problem."""
        try:
            return self._problem(text)
        except Exception as error:  # an odd schema must not take the reader of all answers with it
            return f"it cannot be checked ({type(error).__name__}: {error})"

    def _problem(self, text: str) -> str | None:
        kind = self._constraint.kind
        if kind == "choice":
            return None if text in json.loads(self._constraint.text) else "it is none of the choices"
        if kind in ("json", "json_object"):
            return self._json_problem(text)
        if self._byte_matcher is None:
            return f"the {kind} cannot be compiled for checking"
        matcher = self._byte_matcher.copy()
        if text and not matcher.accept(list(text.encode())):
            return f"it does not match the {kind}"
        return None if matcher.is_finished() else f"it is only the beginning of a match of the {kind}"

    def _json_problem(self, text: str) -> str | None:
        try:
            value = json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return f"it is not JSON ({error})"
        if self._constraint.kind == "json_object":
            return None if isinstance(value, dict) else "it is not a JSON object"
        misfit = next(iter(self._validator.iter_errors(value)), None)
        if misfit is None:
            return None
        path = "".join(f"[{part!r}]" for part in misfit.absolute_path)
        return f"it does not fit the schema at ${path}: {misfit.message[:200]}"

    @cached_property
    def _validator(self) -> Any:
        return validator_of(json.loads(self._constraint.source or self._constraint.text))

    @cached_property
    def _byte_matcher(self) -> GrammarMatcher | None:
        try:
            return byte_backend().compile(self._constraint).matcher
        except GrammarError:
            return None


class EndFinder:
    """Whether beginnings of one answer's text are whole texts. Each costs what it differs from the one before.

    Args:
        new_matcher: makes a matcher over bytes, at the beginning; None if there is no grammar to ask. Called once.
    """

    def __init__(self, new_matcher: Callable[[], GrammarMatcher | None]) -> None:
        self._new_matcher = new_matcher
        self._matcher: GrammarMatcher | None = None
        self._num_bytes: int | None = None

    def is_whole(self, text: str) -> bool:
        """True if the answer may end after ``text``, which is longer or shorter than the last one."""
        if self._num_bytes is None:
            self._matcher, self._num_bytes = self._new_matcher(), 0
        if self._matcher is None:
            return False
        data, num_before = text.encode(), self._num_bytes
        self._num_bytes = len(data)
        if len(data) < num_before:
            self._matcher.rollback(num_before - len(data))
        elif len(data) > num_before and not _accepts(self._matcher, data[num_before:]):
            self._matcher = None
            return False
        return self._matcher.is_finished()


def _accepts(matcher: GrammarMatcher, data: bytes) -> bool:
    try:
        return matcher.accept(list(data))
    except GrammarError:
        return False


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
