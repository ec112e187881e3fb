"""PTX of one row times a warp's tile of 4-bit codes by the matrix units (``packed_ring`` says how)."""

from __future__ import annotations

import struct


def product_ptx(chunks: int, bands: int, number: str, has_minimums: bool) -> str:
    """Sums of a warp's tile, for each band [16 rows, 8 groups] as the matrix units leave them, four a thread; and the
    sums of x of the thread's two groups, each twice.

    Of the inputs: for each chunk and band four words of row g, four of row g + 8 (g = lane / 4), and the numbers of x
    that belong to the lane's group (lane / 4) of columns: two planes of four, each in the low half of a register. Plane
    p of a word is multiplied together with plane p + 4, in the upper half.
    """
    is_bf16 = number == "bf16"
    magic, base = (0x43004300, 128) if is_bf16 else (0x64006400, 1024)
    base += 0 if has_minimums else 8
    first_in = 4 * (bands + 1)
    first_x = first_in + 8 * chunks * bands
    sums = [f"{'de'[band]}{'fg'[pair]}" for band in range(bands) for pair in (0, 1)]
    lines = [
        ".reg .pred odd, upper, high, here;",
        ".reg .b32 lane, m, a<4>, t<8>, x<8>, by;",
        f".reg .f32 {', '.join(f'{name}<4>' for name in sums)}, s, u, v, zero, excess;",
        "mov.u32 lane, %laneid;",
        "and.b32 m, lane, 4; setp.ne.u32 odd, m, 0;",
        "and.b32 m, lane, 8; setp.ne.u32 upper, m, 0; selp.b32 by, 16, 0, upper;",
        "and.b32 m, lane, 16; setp.ne.u32 high, m, 0;",
        f"mov.b32 m, 0x{magic:08x};",
        "mov.f32 zero, 0f00000000;",
        f"mov.f32 excess, {_float_bits(-float(base))};",
        *(f"mov.f32 {name}{i}, zero;" for name in sums for i in range(4)),
        "mov.f32 s, zero;",
        *(line for i in range(8) for line in _take_x(i, first_x + i, is_bf16)),
    ]
    if chunks == 1:
        lines.append("selp.f32 s, zero, s, high;")
    lines += [
        f"{{ .reg .b32 r, q; mov.b32 r, s; shfl.sync.bfly.b32 q, r, {away}, 31, -1; mov.b32 u, q; add.f32 s, s, u; }}"
        for away in (1, 2)
    ]
    for chunk in range(chunks):
        for half in range(2):
            lines.append(_both("here", "odd" if half else "!odd", "high" if chunk else "!high"))
            lines += [f"selp.b32 t{i}, x{i}, 0, here;" for i in range(8)]
            for plane in (0, 1):
                for band in range(bands):
                    start = first_in + 8 * (chunk * bands + band)
                    for pair in (0, 1):
                        lines += _multiply(sums[2 * band + pair], start, pair, plane, half, is_bf16)
    lines += [
        "and.b32 lane, lane, 3; shl.b32 lane, lane, 3;",
        "{ .reg .b32 r, q; mov.b32 r, s; shfl.sync.idx.b32 q, r, lane, 31, -1; mov.b32 u, q;",
        "add.u32 lane, lane, 4; shfl.sync.idx.b32 q, r, lane, 31, -1; mov.b32 v, q; }",
    ]
    for i, own in enumerate("uvuv"):
        for band in range(bands):
            first, second = f"{sums[2 * band]}{i}", f"{sums[2 * band + 1]}{i}"
            lines.append(
                f"add.f32 {first}, {first}, {second}; fma.rn.f32 ${4 * band + i}, {own}, excess, {first};"
            )
        lines.append(f"mov.f32 ${4 * bands + i}, {own};")
    return "{ " + "\n".join(lines) + " }"


def _take_x(i: int, operand: int, is_bf16: bool) -> list[str]:
    """PTX: a number of x added to s, and in x<i> where the lane's planes have theirs."""
    if is_bf16:
        added = f"shl.b32 t0, ${operand}, 16; mov.b32 u, t0; add.f32 s, s, u;"
    else:
        added = f"{{ .reg .b16 h, z; mov.b32 {{h, z}}, ${operand}; cvt.f32.f16 u, h; add.f32 s, s, u; }}"
    return [added, f"shl.b32 x{i}, ${operand}, by;"]


def _multiply(sums: str, start: int, pair: int, plane: int, half: int, is_bf16: bool) -> list[str]:
    """PTX: 16 x 16 codes of two words of either row, made numbers, times x.

    start: operand of the band's first word.  pair: which words.  plane, half: which of their planes, and x.
    """
    shift, kind = 4 * (2 * half + plane), "bf16" if is_bf16 else "f16"
    lines = []
    for place in range(4):
        column, row = divmod(place, 2)
        source = f"${start + 4 * row + 2 * pair + column}"
        if shift:
            lines.append(f"shr.u32 a{place}, {source}, {shift};")
            source = f"a{place}"
        lines.append(f"lop3.b32 a{place}, {source}, 0x000f000f, m, 0xEA;")
    total, b = ", ".join(f"{sums}{i}" for i in range(4)), 4 * plane + 2 * pair
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    return [*lines, f"{product} {{{total}}}, {{a0, a1, a2, a3}}, {{t{b}, t{b + 1}}}, {{{total}}};"]


def _both(target: str, first: str, second: str) -> str:
    """PTX: target = first and second, predicates that may be negated."""
    plain, rest = (first, second) if not first.startswith("!") else (second, first)
    if plain.startswith("!"):
        return f"or.pred {target}, {first[1:]}, {second[1:]}; not.pred {target}, {target};"
    if rest.startswith("!"):
        return f"not.pred {target}, {rest[1:]}; and.pred {target}, {target}, {plain};"
    return f"and.pred {target}, {plain}, {rest};"


def _float_bits(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"
