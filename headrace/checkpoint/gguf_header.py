"""HeaderReader: bounds-checked reading of a GGUF header, and GGUFStrings, a string array decoded on first use."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from headrace.checkpoint.gguf_types import SCALAR_CODES, ValueType
from headrace.checkpoint.header_bytes import HeaderBytes
from headrace.errors import CheckpointError

MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 22
MAX_ARRAY_DEPTH = 3

_LENGTH = struct.Struct("<Q")


class GGUFStrings(Sequence[str]):
    """An array of strings in a GGUF header; its bounds are checked on opening, its text is decoded on first use."""

    def __init__(self, path: Path, key: str, data: bytes, count: int) -> None:
        self._path, self._key = path, key
        self._data, self._count = data, count
        self._decoded: list[str] | None = None

    def to_list(self) -> list[str]:
        """All strings.

        Raises:
            CheckpointError: one is not UTF-8.
        """
        if self._decoded is None:
            self._decoded = [self._decode(index, item) for index, item in enumerate(self.raw_items())]
        return self._decoded

    def raw_items(self) -> list[bytes]:
        """All strings as the bytes in the file."""
        blob, unpack, position, items = self._data, _LENGTH.unpack_from, 0, []
        for _ in range(self._count):
            begin = position + 8
            position = begin + unpack(blob, position)[0]
            items.append(blob[begin:position])
        return items

    def _decode(self, index: int, item: bytes) -> str:
        try:
            return item.decode()
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self._path}: item {index} of key '{self._key}' is not UTF-8 ({item[:40]!r})"
            ) from None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.to_list()[index]


GGUFScalar = str | int | float | bool
GGUFValue = GGUFScalar | GGUFStrings | tuple[int, ...] | tuple[float, ...] | tuple[object, ...]


class HeaderReader:
    """Reads one field after another; anything that does not fit into the file is a CheckpointError."""

    def __init__(self, file: HeaderBytes) -> None:
        self.path = file.path
        self.num_bytes = file.num_bytes
        self.position = 0
        self._file = file

    def take(self, num_bytes: int, what: str) -> bytes:
        """The next bytes; ``what`` names them in the error."""
        end = self.position + num_bytes
        if end > self.num_bytes:
            raise CheckpointError(
                f"{self.path}: the header is cut off: {what} needs {num_bytes} bytes at byte {self.position}, "
                f"but the file has {self.num_bytes}"
            )
        taken = self._file.first(end)[self.position : end]
        self.position = end
        return taken

    def uint32(self, what: str) -> int:
        """The next four bytes as an unsigned number."""
        return int.from_bytes(self.take(4, what), "little")

    def uint64(self, what: str) -> int:
        """The next eight bytes as an unsigned number."""
        return int.from_bytes(self.take(8, what), "little")

    def check_room(self, count: int, min_item_bytes: int, what: str) -> None:
        """Refuses a count that the rest of the file cannot hold, before anything loops over it."""
        room = self.num_bytes - self.position
        if count * min_item_bytes > room:
            raise CheckpointError(
                f"{self.path}: the header promises {count} {what}, more than fit into the {room} bytes that follow"
            )

    def string(self, what: str) -> str:
        """A length and that many bytes of UTF-8."""
        length = self.uint64(f"the length of {what}")
        if length > MAX_STRING_BYTES:
            raise CheckpointError(
                f"{self.path}: {what} claims a length of {length} bytes (limit {MAX_STRING_BYTES})"
            )
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8 ({raw[:40]!r})") from None

    def value(self, key: str) -> GGUFValue:
        """A type tag and the value of metadata key ``key``."""
        return self._typed_value(key, self.uint32(f"the type of key '{key}'"), depth=0)

    def _typed_value(self, key: str, value_type: int, depth: int) -> GGUFValue:
        what = f"the value of key '{key}'"
        if value_type == ValueType.STRING:
            return self.string(what)
        if value_type == ValueType.ARRAY:
            return self._array(key, depth)
        if value_type not in SCALAR_CODES:
            raise CheckpointError(f"{self.path}: key '{key}' has the unknown value type {value_type}")
        code, size = SCALAR_CODES[value_type]
        scalar: int | float | bool = struct.unpack("<" + code, self.take(size, what))[0]
        return scalar

    def _array(self, key: str, depth: int) -> GGUFValue:
        what = f"the array of key '{key}'"
        item_type, count = self.uint32(what), self.uint64(what)
        if count > MAX_ARRAY_ITEMS:
            raise CheckpointError(f"{self.path}: key '{key}' claims {count} items (limit {MAX_ARRAY_ITEMS})")
        if item_type == ValueType.STRING:
            return self._string_array(key, count)
        if item_type == ValueType.ARRAY:
            self.check_room(count, 12, f"arrays in key '{key}'")
            if depth == MAX_ARRAY_DEPTH:
                raise CheckpointError(f"{self.path}: key '{key}' nests arrays deeper than {MAX_ARRAY_DEPTH}")
            return tuple(self._array(key, depth + 1) for _ in range(count))
        if item_type not in SCALAR_CODES:
            raise CheckpointError(f"{self.path}: key '{key}' is an array of the unknown type {item_type}")
        code, size = SCALAR_CODES[item_type]
        return struct.unpack(f"<{count}{code}", self.take(count * size, what))

    def _string_array(self, key: str, count: int) -> GGUFStrings:
        self.check_room(count, 8, f"strings in key '{key}'")
        start = position = self.position
        unpack, data, end = _LENGTH.unpack_from, b"", self.num_bytes
        try:
            for _ in range(count):
                if position + 8 > len(data):
                    data = self._file.first(position + 8)
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):
            position = end + 1
        if position > end:
            raise CheckpointError(f"{self.path}: the header is cut off inside the strings of key '{key}'")
        self.position = position
        return GGUFStrings(self.path, key, self._file.first(position)[start:position], count)
