"""What the kernels of packed weights are compiled for, and how they take codes out of words by bits.

A code put into the fraction of a number whose exponent fits makes that number's base plus the code: one instruction,
where converting an integer takes one of a quarter of the rate. Bases are subtracted at the end, times the sum of x, or
at once where tensor cores take the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from headrace.kernels.triton.source_digest import digest_of
from headrace.kernels.triton.word_matrix import CHUNK_WORDS

_SIGN_BYTES = 0x80808080 - (1 << 32)


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """What a kernel is compiled for.

    num_inputs: K.  bits: 4 or 8.  group: columns of a scale.
    block_t, block_n: rows of x and outputs of a program.  block_w: words of a row in one round.
    num_splits: parts of the inputs, each a program's.
    """

    num_inputs: int
    bits: int
    group: int
    block_t: int
    block_n: int
    block_w: int
    has_minimums: bool
    has_bias: bool
    num_splits: int = 1
    sources: str = field(default=digest_of(__file__), kw_only=True)

    @property
    def num_planes(self) -> int:
        """Codes of a word."""
        return 32 // self.bits

    @property
    def chunk(self) -> int:
        """Columns of 16 words."""
        return CHUNK_WORDS * self.num_planes

    @property
    def num_words(self) -> int:
        """Words of a row."""
        return -(-self.num_inputs // self.chunk) * CHUNK_WORDS

    @property
    def num_groups(self) -> int:
        """Scales of a row."""
        return -(-self.num_inputs // self.group)

    @property
    def span_planes(self) -> int:
        """Planes of a chunk that surely share a scale."""
        return min(self.num_planes, math.gcd(self.group, self.chunk) // CHUNK_WORDS)

    @property
    def num_spans(self) -> int:
        """Scales of a chunk, at most."""
        return self.num_planes // self.span_planes

    @property
    def has_whole_rounds(self) -> bool:
        """Whether the words of a row are whole rounds and its columns whole chunks."""
        return self.num_words % self.block_w == 0 and self.num_inputs % self.chunk == 0

    @property
    def last_word(self) -> int:
        """Where the last round begins."""
        return (self.num_words - 1) // self.block_w * self.block_w

    @property
    def words_each(self) -> int:
        """Words of one split: whole rounds."""
        rounds = -(-self.num_words // self.block_w)
        return -(-rounds // self.num_splits) * self.block_w

    @property
    def block_groups(self) -> int:
        """Groups of one split, padded to a power of two."""
        columns = self.words_each // CHUNK_WORDS * self.chunk
        return 1 << (-(-columns // self.group)).bit_length()

    @property
    def zero(self) -> float:
        """What is subtracted from 4-bit codes."""
        return 8.0 if self.bits == 4 and not self.has_minimums else 0.0

    @property
    def flip(self) -> int:
        """XORed into words before their fields are taken: signed codes plus 128 have no sign."""
        return _SIGN_BYTES if self.bits == 8 else 0

    def _place(self, plane: Any) -> int:
        """The bit of an fp32 number that a plane's codes are moved to: few moves, small bases."""
        plane = int(getattr(plane, "value", plane))
        if self.bits == 8:
            return 15
        return 12 if plane in (1, 3, 5) else 16

    def shift_left(self, plane: Any) -> int:
        """By how many bits words are shifted to the left for a plane's field; to the right where negative."""
        return self._place(plane) - self.bits * int(getattr(plane, "value", plane))

    def field_mask(self, plane: Any) -> int:
        """The bits of a plane's field."""
        return ((1 << self.bits) - 1) << self._place(plane)

    def field_exponent(self, plane: Any) -> int:
        """Bits of the number that a code is added to, its base."""
        return (127 + 23 - self._place(plane)) << 23

    def field_ptx(self, plane: Any) -> str:
        """PTX of (word & mask) | exponent, which the compiler would make two of: an instruction has one constant."""
        exponent, mask = self.field_exponent(plane), self.field_mask(plane)
        head = f"{{ .reg .b32 e, x; mov.b32 e, 0x{exponent:08x};"
        return f"{head} lop3.b32 x, $1, 0x{mask:08x}, e, 0xEA; mov.b32 $0, x; }}"

    def field_excess(self, plane: Any) -> float:
        """What a plane's field exceeds the number that is multiplied by the scale by."""
        return 2.0 ** (23 - self._place(plane)) + (128.0 if self.bits == 8 else self.zero)

    def pair_ptx(self, plane: Any, number: Any) -> str:
        """PTX that makes of two words ($1, $2), a scale twice ($3) and perhaps a minimum twice ($4) two weights ($0) of
        ``number``, "bf16" or "fp16"."""
        plane = int(getattr(plane, "value", plane))
        is_bf16 = getattr(number, "value", number) == "bf16"
        kind, one, none = ("bf16x2", 0x3F80, 0x8000) if is_bf16 else ("f16x2", 0x3C00, 0x8000)
        steps = _nibbles(plane, is_bf16, self.zero) if self.bits == 4 else _bytes(plane, is_bf16)
        rest = "$4" if self.has_minimums else "n"
        head = [".reg .b32 x, y, one, n;", f"mov.b32 one, {_twice(one)};", f"mov.b32 n, {_twice(none)};"]
        return "{ " + "\n".join([*head, *steps, f"fma.rn.{kind} $0, x, $3, {rest};"]) + " }"


def _twice(half: int) -> str:
    return f"0x{half:04x}{half:04x}"


def _nibbles(plane: int, is_bf16: bool, zero: float) -> list[str]:
    """Two codes less ``zero`` in x. 0x4300 is 128 in bf16, 0x6400 is 1024 in fp16; of the sum 1 is the lowest bit."""
    kind, base = ("bf16x2", 0x4300) if is_bf16 else ("f16x2", 0x6400)
    return [
        f"prmt.b32 x, $1, $2, {'0x5410' if plane < 4 else '0x7632'};",
        *([f"shr.u32 x, x, {4 * (plane % 4)};"] if plane % 4 else []),
        f"mov.b32 y, {_twice(base)};",
        "lop3.b32 x, x, 0x000f000f, y, 0xEA;",  # (x & mask) | base
        f"mov.b32 y, {_twice(0x8000 | base | int(zero))};",
        f"fma.rn.{kind} x, x, one, y;",
    ]


def _bytes(plane: int, is_bf16: bool) -> list[str]:
    """Two signed codes in x. The seven bits of a bf16 fraction lack the sign, which is a number of its own: 128 or 256
    in place of 128; fp16 has room for the code plus 128."""
    select = f"prmt.b32 x, $1, $2, 0x{4 + plane}{4 + plane}{plane}{plane};"
    if not is_bf16:
        return [
            select,
            "mov.b32 y, 0x64806480;",
            "lop3.b32 x, x, 0x00ff00ff, y, 0x6A;",  # (x & mask) ^ y
            "mov.b32 y, 0xe480e480;",
            "fma.rn.f16x2 x, x, one, y;",
        ]
    return [
        ".reg .b32 s;",
        select,
        "mov.b32 y, 0x43004300;",
        "lop3.b32 s, x, 0x00800080, y, 0xEA;",
        "lop3.b32 x, x, 0x007f007f, y, 0xEA;",
        "mov.b32 y, 0xbf80bf80;",  # -1
        "fma.rn.bf16x2 x, s, y, x;",
    ]
