"""What llguidance says of a grammar that it cannot compile, in one line that a person can use."""

from __future__ import annotations

import re

# "at 1(8): " is line 1, column 8 of the grammar as the library got it.
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REGEX_REPORT = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^.*\nerror: (.*)")
_WORD_BOUNDARY = re.compile(r"lookarounds not supported yet; Word\w* in regex (/.*/)")
_SHOWN_CHARS = 80


def why_not_compiled(report: str, kind: str) -> str:
    """The reason in ``report``, which has several lines, for a constraint of this kind ("gbnf" for such a grammar).

    A place is told where it is one in the user's own text: a line of a grammar, a character of a regex.
    """
    report = report.strip()
    place = _PLACE.match(report)
    where = f"line {place[1]}, column {place[2]}: " if place is not None and kind == "grammar" else ""
    return where + _reason(report[place.end() :] if place is not None else report, kind)


def _reason(report: str, kind: str) -> str:
    if found := _REGEX_REPORT.search(report):
        pattern, before, reason = found.groups()
        own = "" if kind == "regex" else f"the regex {_shown(pattern)}, "
        return f"{own}at character {len(before) + 1}: {reason}"
    if found := _WORD_BOUNDARY.search(report):
        own = "" if kind == "regex" else f"the regex {_shown(found[1])}: "
        return f"{own}word boundaries (\\b, \\B) are not supported"
    return report.split("\n")[0]


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= _SHOWN_CHARS else f"{pattern[:_SHOWN_CHARS]}…")
