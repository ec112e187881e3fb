"""ConfigFields: typed look-ups in a JSON or GGUF mapping whose errors name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from headrace.errors import CheckpointError

MAX_SIZE = 1 << 30


class ConfigFields:
    """Reads fields of ``values``; a missing or ill-typed one raises CheckpointError naming ``where`` and the key.

    A key that is absent or null gives the default; without a default it is an error.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.where = where
        self._values = values
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(self._prefix + key) is not None

    def raw(self, key: str) -> Any:
        """The value as it is, or None."""
        return self._values.get(self._prefix + key)

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raises the error for ``key``."""
        raise CheckpointError(f"{self.where}: key '{self._prefix}{key}' {problem}")

    def size(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A count or size: a whole number from ``minimum`` to 2**30."""
        value = self._number(key, default)
        # The range comes first: infinity, which JSON files may hold, has no whole number.
        if not minimum <= value <= MAX_SIZE or value != int(value):
            self.fail(key, f"is {value!r}, not a whole number from {minimum} to {MAX_SIZE}")
        return int(value)

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, above 0 unless told otherwise."""
        value = self._number(key, default)
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or (positive and value <= 0):
            self.fail(key, f"is {value!r}, not a finite{' positive' if positive else ''} number")
        return value

    def optional_size(self, key: str) -> int | None:
        """A size, or None when absent."""
        return self.size(key) if self.has(key) else None

    def optional_number(self, key: str) -> float | None:
        """A number above 0, or None when absent."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"is {value!r}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            self.fail(key, f"is {value!r}, not a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; empty when absent. Negative ids, which some files use for 'none', are dropped."""
        value = self.raw(key)
        ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        for item in ids:
            if not isinstance(item, int) or isinstance(item, bool) or item > MAX_SIZE:
                self.fail(key, f"is {value!r}, not a token id or a list of them")
        return tuple(item for item in ids if item >= 0)

    def nested(self, key: str) -> ConfigFields | None:
        """The fields of an object, or None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(key, f"is {value!r}, not an object")
        return ConfigFields(value, f"{self.where}: '{self._prefix}{key}'")

    def _value(self, key: str, default: Any) -> Any:
        """What is there, else the default; None for either is none."""
        value = self.raw(key) if self.has(key) else default
        if value is None:
            self.fail(key, "is missing")
        return value

    def _number(self, key: str, default: float | None) -> int | float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            self.fail(key, f"is {value!r}, not a number")
        return value
