"""FieldNames: errors speak of fields in the client's words, whatever the API and the spelling it chose."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

from headrace.errors import RequestError
from headrace.serve.errors import ApiError

E = TypeVar("E", bound=Exception)

_INDEX = r"\[\d+\]"


class FieldNames:
    """Renames fields in errors: ``{our name: the client's}``.

    A name may be a path; ``[*]`` in it stands for any index. A name without a mark that only identifiers have ("stop",
    "prompt") is also a word of English, so it is renamed in messages about that very field alone.

    Args:
        names: applied all at once, the longest first.
        params: for ``param`` only; the message says it in words.
    """

    def __init__(
        self, names: Mapping[str, str] | None = None, params: Mapping[str, str] | None = None
    ) -> None:
        self._names = dict(names or {})
        self._params = {**self._names, **(params or {})}
        self._after: FieldNames | None = None

    def then(self, after: FieldNames) -> FieldNames:
        """These names, and then those: an API over another one."""
        both = FieldNames(self._names)
        both._params = self._params
        both._after = after if self._after is None else self._after.then(after)
        return both

    def rename(self, error: E) -> E:
        """The error in the client's words; one that speaks of no field is itself."""
        renamed = self._renamed(error)
        return renamed if self._after is None else self._after.rename(renamed)

    @contextlib.contextmanager
    def spoken(self) -> Iterator[None]:
        """Errors of fields leave the block renamed."""
        try:
            yield
        except (RequestError, ApiError) as error:
            raise self.rename(error) from None

    def _renamed(self, error: E) -> E:
        if not isinstance(error, RequestError | ApiError) or not self._params:
            return error
        own = error.param
        param = own and _replace(self._params, own, "^")
        names = {ours: theirs for ours, theirs in self._names.items() if ours == own or not ours.isalpha()}
        message = _replace(names, error.message, r"(?<![\w.'\"])") if names else error.message
        if isinstance(error, ApiError):
            return type(error)(error.status, message, param=param, code=error.code, headers=error.headers)
        return type(error)(message, param=param, code=error.code)


def _replace(names: Mapping[str, str], text: str, before: str) -> str:
    patterns = {name: re.escape(name).replace(re.escape("[*]"), _INDEX) for name in names}
    ordered = sorted(names, key=len, reverse=True)

    def put(match: re.Match[str]) -> str:
        name = next(name for name in ordered if re.fullmatch(patterns[name], match[0]))
        index = re.search(_INDEX, match[0])
        return names[name].replace("[*]", index[0] if index else "")

    either = "|".join(patterns[name] for name in ordered)
    return re.sub(f"{before}(?:{either})(?![\\w'\"])", put, text)
