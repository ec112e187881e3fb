"""Codes of 8 bits on their way to the products of ``coded_ring_kernel``: into a ring in shared memory by asynchronous
copies, out of it as words that lie where the matrix units want their numbers, and from words to fp16.

Legend: W warps, S keys of a warp in one round, G = W * S / 16 sixteens of keys; a word is four codes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from headrace.kernels.triton.gluon_names import async_load

HEAD_DIM = 128
SIXTEEN = gl.constexpr(16)
WORDS = gl.constexpr(HEAD_DIM // 4)
SHARED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))


def _in_pairs(*steps: str) -> gl.constexpr:
    """PTX of two words ($4, $5) and four pairs of fp16."""
    return gl.constexpr("{ .reg .b32 x, y, u, v; .reg .b16 a, b, c, d;\n" + "\n".join(steps) + "\n}")


_BY_DIMS = ("mov.b32 x, $4;", "mov.b32 y, $5;")  # first word: $0 $1, second: $2 $3
_BY_KEYS = ("prmt.b32 x, $4, $5, 0x5140;", "prmt.b32 y, $4, $5, 0x7362;")  # of byte j of both words: $j


def _fp8(kind: str) -> tuple[str, ...]:
    return (
        "mov.b32 {a, b}, x;",
        "mov.b32 {c, d}, y;",
        *(f"cvt.rn.f16x2.{kind}x2 ${place}, {half};" for place, half in enumerate("abcd")),
    )


def _upper() -> tuple[str, ...]:
    """A code of e5m2 is the upper byte of fp16."""
    return (
        "mov.b32 u, 0;",
        *(
            f"prmt.b32 ${place}, {word}, u, {pick};"
            for place, (word, pick) in enumerate((w, p) for w in "xy" for p in ("0x1404", "0x3424"))
        ),
    )


def _int8() -> tuple[str, ...]:
    """0x6400 is 1024, of which a byte is the lowest bits of the fraction."""
    steps = ["xor.b32 x, x, 0x80808080;", "xor.b32 y, y, 0x80808080;", "mov.b32 u, 0x64646464;"]
    steps.append("mov.b32 v, 0xe480e480;")  # -1152
    for place, (word, pick) in enumerate((w, p) for w in "xy" for p in ("0x4140", "0x4342")):
        steps += [f"prmt.b32 ${place}, {word}, u, {pick};", f"add.rn.f16x2 ${place}, ${place}, v;"]
    return tuple(steps)


KEY_E4M3, VALUE_E4M3 = (_in_pairs(*first, *_fp8("e4m3")) for first in (_BY_DIMS, _BY_KEYS))
KEY_E5M2, VALUE_E5M2 = (_in_pairs(*first, *_upper()) for first in (_BY_DIMS, _BY_KEYS))
KEY_INT8, VALUE_INT8 = (_in_pairs(*first, *_int8()) for first in (_BY_DIMS, _BY_KEYS))


@gluon.constexpr_function
def scores_layout(warps):
    """[W, M, S] or [W, M, words]: of products; each warp has its own."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def bases(count, rank, first=1):
    """Of ``count`` places from one to the next in the first of ``rank`` dims."""
    return [[first << i] + [0] * (rank - 1) for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def _copy_words(warps, sixteens):
    """[G, 16, words]: 16 bytes a thread, each warp what it will read."""
    each = sixteens // warps
    reg = [[0, 0, 1], [0, 0, 2], [0, 4, 0], [0, 8, 0], *bases(each, 3)]
    lane = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(reg, lane, bases(warps, 3, each), [], [sixteens, 16, 32])


@gluon.constexpr_function
def key_words(warps, sixteens):
    """[G, 16, words]: 32 bytes of every eighth key a thread."""
    each = sixteens // warps
    reg = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0], *bases(each, 3)]
    lane = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(reg, lane, bases(warps, 3, each), [], [sixteens, 16, 32])


@gluon.constexpr_function
def value_words(warps, sixteens):
    """[G, 16, words]: 16 bytes of four keys a thread."""
    each = sixteens // warps
    reg = [[0, 1, 0], [0, 0, 1], [0, 0, 2], [0, 8, 0], *bases(each, 3)]
    lane = [[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]]
    return gl.DistributedLinearLayout(reg, lane, bases(warps, 3, each), [], [sixteens, 16, 32])


@gluon.constexpr_function
def scale_words(warps, sixteens):
    """[G, 16]: a key's scale where its scores are."""
    each = sixteens // warps
    reg = [[0, 1], [0, 8], *bases(each, 2)]
    lane = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(reg, lane, bases(warps, 2, each), [], [sixteens, 16])


@gluon.jit
def _block_place(blocks, stride):
    return blocks.to(gl.uint32).to(gl.uint64) * stride.to(gl.uint32).to(gl.uint64)


@gluon.jit
def load_ids(table, first, end, C: gl.constexpr, LAYOUT: gl.constexpr):
    """[G] ids of the blocks that hold the sixteens of keys from ``first`` on; 0 from ``end`` on."""
    key = first + SIXTEEN * gl.arange(0, C.block_n // SIXTEEN, layout=LAYOUT)
    return gl.load(table + key // C.block_size, mask=key < end, other=0)


@gluon.jit
def ask(target, source, blocks, first, start, end, word_stride, C: gl.constexpr, WARPS: gl.constexpr):
    """Ask for the words of the keys from ``first`` on; zeros outside of [start, end).

    As a number a code may be none, and a weight of zero would let it into the result.
    """
    LAYOUT: gl.constexpr = _copy_words(WARPS, C.block_n // SIXTEEN)
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    sixteen = gl.arange(0, C.block_n // SIXTEEN, layout=gl.SliceLayout(1, ROWS))
    slot = gl.arange(0, 16, layout=gl.SliceLayout(0, ROWS))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, COLUMNS))
    place = _block_place(gl.convert_layout(blocks, gl.SliceLayout(1, ROWS), assert_trivial=True), word_stride)
    if C.block_size != SIXTEEN:
        place += ((first + SIXTEEN * sixteen) % C.block_size * WORDS).to(gl.uint64)
    pointers = (
        source + place[:, None][:, :, None] + (slot * WORDS)[None, :][:, :, None] + word[None, :][:, None, :]
    )
    inside = (SIXTEEN * sixteen)[:, None] + slot[None, :] < end - first
    if C.has_window:
        inside = inside & ((SIXTEEN * sixteen)[:, None] + slot[None, :] >= start - first)
    mask = gl.broadcast(inside[:, :, None], pointers)[0]
    async_load(target, pointers, mask=mask)
    async_copy.commit_group()


@gluon.jit
def load_scales(scales_ptr, blocks, first, end, scales_stride, C: gl.constexpr, WARPS: gl.constexpr):
    """[W, S] scales of the keys from ``first`` on; anything outside of them."""
    LAYOUT: gl.constexpr = scale_words(WARPS, C.block_n // SIXTEEN)
    sixteen = gl.arange(0, C.block_n // SIXTEEN, layout=gl.SliceLayout(1, LAYOUT))
    slot = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    place = _block_place(blocks, scales_stride)
    if C.block_size != SIXTEEN:
        place += ((first + SIXTEEN * sixteen) % C.block_size).to(gl.uint64)
    pointers = scales_ptr + place[:, None] + slot[None, :]
    mask = gl.broadcast((SIXTEEN * sixteen < end - first)[:, None], pointers)[0]
    scales = gl.load(pointers, mask=mask, other=0.0).reshape([WARPS, C.block_n // WARPS])
    return gl.convert_layout(scales, gl.SliceLayout(1, scores_layout(WARPS)), assert_trivial=True)


@gluon.jit
def numbers(words, PTX: gl.constexpr):
    """Four tensors of as many fp16 as there are words: of two words four pairs, by ``PTX``."""
    return gl.inline_asm_elementwise(
        PTX,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def key_operand(k, C: gl.constexpr, WARPS: gl.constexpr):
    """[G, 16, words] -> [W, words, S]"""
    k = k.reshape([WARPS, C.block_n // WARPS, 4, 2, 2, 2]).permute([0, 3, 4, 2, 5, 1])
    k = k.reshape([WARPS, WORDS, C.block_n // WARPS])
    return gl.convert_layout(k, gl.DotOperandLayout(1, scores_layout(WARPS), 2), assert_trivial=True)


@gluon.jit
def value_operand(v, C: gl.constexpr, WARPS: gl.constexpr):
    """[G, 16, words] -> [W, S, words]"""
    v = v.reshape([WARPS, C.block_n // WARPS, 8, 4]).permute([0, 1, 3, 2])
    v = v.reshape([WARPS, C.block_n // WARPS, WORDS])
    return gl.convert_layout(v, gl.DotOperandLayout(1, scores_layout(WARPS), 2), assert_trivial=True)
