"""PTX of one row times a warp's tile of 4-bit codes by the matrix units (``packed_ring`` says how)."""

from __future__ import annotations

_HIGH_CODES, _SIGNS = 0xF0F0F0F0, 0x80808080
_MAGIC = 0x4B400000
"""12582912.0: the number of these bits plus an integer below 2 ** 22 is the one with the integer added to the bits."""
_PLAIN, _TIMES_256 = "0fCB400000", "0fCF400000"
"""What to take off again: -12582912.0, and 256 times that."""

PAIR_PTX = "{ .reg .b32 both; prmt.b32 both, $1, $2, 0x5410; xor.b32 $0, both, 0x00800080; }"
"""The digits 256 a + b of two numbers that are 256 a + b + 128: the upper byte is right, for b is signed, and in the
lower one a bit is turned."""


def product_ptx(chunks: int, bands: int, has_minimums: bool) -> str:
    """Sums of a warp's tile, for each chunk and band [16 rows, 4 groups x 2 digits] as the matrix units leave them,
    four a thread: 256 times those of the first digit, and those of the second. All are 16 times too large.

    Of the inputs: for each chunk and band four words of row g, four of row g + 8 (g = lane / 4); for each chunk the
    digits of x of the lane's group of columns (lane / 8), four columns of either plane, two in a register; and which
    byte of them goes where, two selectors, each twice.

    Byte b of a word has codes of group b alone, so that one product has eight inputs of each of the four groups, and
    a column's x is zero but in one byte of each register.
    """
    sums = 4 * chunks * bands
    words, x = sums, sums + 8 * chunks * bands
    choose = x + 4 * chunks
    lines = [".reg .b32 a<4>, b<8>, c<4>, s, m;", f"mov.b32 s, 0x{_SIGNS:08x}; mov.b32 m, 0x{_MAGIC:08x};"]
    for chunk in range(chunks):
        for place in range(8):
            lines.append(f"prmt.b32 b{place}, ${x + 4 * chunk + place // 2}, 0, ${choose + place % 2};")
        for band in range(bands):
            block = chunk * bands + band
            lines += ["mov.b32 c0, m; mov.b32 c1, m; mov.b32 c2, m; mov.b32 c3, m;"]
            for word in range(4):
                lines += _multiply(words + 8 * block + word, word, has_minimums)
            lines += [_as_number(4 * block + i, i) for i in range(4)]
    return "{ " + "\n".join(lines) + " }"


def _multiply(word: int, place: int, has_minimums: bool) -> list[str]:
    """PTX: 16 x 32 codes of a word of either row, made 16 times their value, times x."""
    lines = []
    for row in (0, 1):
        source = f"${word + 4 * row}"
        lines += [f"shl.b32 a{row}, {source}, 4;", _numbers(f"a{row}", f"a{row}", has_minimums)]
        lines.append(_numbers(f"a{row + 2}", source, has_minimums))
    kind = "u8" if has_minimums else "s8"
    sums = "{c0, c1, c2, c3}"
    product = f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32"
    return [*lines, f"{product} {sums}, {{a0, a1, a2, a3}}, {{b{place}, b{place + 4}}}, {sums};"]


def _numbers(target: str, source: str, has_minimums: bool) -> str:
    """PTX: 16 times the codes in the upper halves of bytes, or the codes less 8."""
    if has_minimums:
        return f"and.b32 {target}, {source}, 0x{_HIGH_CODES:08x};"
    return f"lop3.b32 {target}, {source}, 0x{_HIGH_CODES:08x}, s, 0x6A;"  # (source & codes) ^ signs


def _as_number(result: int, place: int) -> str:
    """PTX: a sum as fp32."""
    if place % 2:
        return f"add.f32 ${result}, c{place}, {_PLAIN};"
    return f"fma.rn.f32 ${result}, c{place}, 0f43800000, {_TIMES_256};"
