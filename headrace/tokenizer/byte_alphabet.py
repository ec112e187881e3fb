"""The byte-level alphabet of GPT-2: one printable character for each of the 256 bytes."""

from __future__ import annotations


def _byte_to_char() -> tuple[str, ...]:
    """Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(spare)) for byte in range(256))


BYTE_TO_CHAR = _byte_to_char()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}
