"""The budget of one template rendering: time, steps and text, counted before anything large is made."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError

MAX_RENDER_CPU_S = 2.0
MAX_STEPS = 2_000_000
MAX_TEXT_CHARS = 150_000_000
MAX_WIDTH = 1_000_000
MAX_INTEGER_BITS = 4096

_LONG_NUMBER = re.compile(r"\d{7,}")


class TemplateLimitError(TemplateError):
    """A template went past a limit of the sandbox."""


class RenderBudget:
    """What is left of one rendering's time, steps and text."""

    def __init__(self) -> None:
        self._cpu_deadline_s = time.thread_time() + MAX_RENDER_CPU_S
        self._next_check_s = time.perf_counter() + 0.1
        self._steps = 0
        self._chars = 0

    def step(self, num_chars: int = 0) -> None:
        """Counts one unit of work and the text it adds."""
        self._steps += 1
        self._chars += num_chars
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"the template takes more than {MAX_STEPS} steps")
        if self._chars > MAX_TEXT_CHARS:
            raise TemplateLimitError(f"the template makes more than {MAX_TEXT_CHARS} characters")
        # The thread's own CPU time is what counts, but the wall clock is ten times cheaper to read.
        now_s = time.perf_counter()
        if now_s > self._next_check_s:
            self._next_check_s = now_s + 0.05
            if time.thread_time() > self._cpu_deadline_s:
                raise TemplateLimitError(f"the template takes longer than {MAX_RENDER_CPU_S:g} seconds")


_budget: ContextVar[RenderBudget | None] = ContextVar("chat_template_budget", default=None)


@contextmanager
def render_budget() -> Iterator[None]:
    """A fresh budget for the rendering inside."""
    token = _budget.set(RenderBudget())
    try:
        yield
    finally:
        _budget.reset(token)


def step(num_chars: int = 0) -> None:
    """Counts one unit of work against the rendering's budget; while compiling there is none."""
    budget = _budget.get()
    if budget is not None:
        budget.step(num_chars)


def count_text(value: Any) -> None:
    """Counts what ``value`` would be as text, without making it: lists within lists can grow past any bound."""
    if isinstance(value, str):
        step(len(value))
        return
    pending = [value]
    while pending:
        item = pending.pop()
        step(len(item) if isinstance(item, (str, bytes)) else 1)
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set)):
            pending += item


def size(value: str | bytes | list[Any] | tuple[Any, ...]) -> int:
    """The memory of a text or a list itself, in characters of text: an item of a list takes a pointer."""
    return len(value) * (8 if isinstance(value, (list, tuple)) else 1)


def count_repeats(text: str, times: int) -> None:
    """Counts a text that is to be put down ``times`` times."""
    step(len(text) * max(times, 0))


def count_indent(text: str, width: int | str) -> None:
    """Counts what is put before the lines of ``text``."""
    step(_num_lines(text) * (len(width) if isinstance(width, str) else max(width, 0)))


def count_wrap(text: str, width: int, separator: str) -> None:
    """Counts what wrapping makes: a separator a line, and the rest of a long word copied at each of its breaks."""
    width = max(width, 1)
    rests = sum(len(word) ** 2 // (2 * width) for word in text.split() if len(word) > width)
    step(rests)
    count_repeats(separator, _num_lines(text) + 2 * len(text) // width)


def _num_lines(text: str) -> int:
    return len(text.splitlines()) + 1


def check_widths(values: Iterable[Any]) -> None:
    """Refuses numbers above the limit among widths of texts to be made."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateLimitError(f"the width {value} is above {MAX_WIDTH}")


def check_format(text: str, values: Iterable[Any]) -> None:
    """Counts what a format can make of ``values``; refuses huge widths, written in it or given as values."""
    values = list(values)
    if _LONG_NUMBER.search(text):
        raise TemplateLimitError(f"a width in the format {text[:40]!r} is above {MAX_WIDTH}")
    if "*" in text or re.search(r":[^}]*\{", text):
        check_widths(values)
    fields = text.count("%") + text.count("{")
    for value in values:
        if isinstance(value, str):
            count_repeats(value, fields)
        else:
            count_text(value)


def check_product(left: Any, right: Any) -> None:
    """Counts a repetition, and refuses products of numbers that have thousands of digits."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, (str, bytes, list, tuple)) and isinstance(other, int):
            step(size(one) * max(other, 0))
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())


def check_power(base: Any, exponent: Any) -> None:
    """Refuses powers that have thousands of digits."""
    if isinstance(base, int) and isinstance(exponent, int):
        check_bits(base.bit_length() * max(exponent, 0))


def check_bits(num_bits: int) -> None:
    """Refuses whole numbers of more bits than the limit."""
    if num_bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"a number would have more than {MAX_INTEGER_BITS} bits")
