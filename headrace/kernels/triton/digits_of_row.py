"""A row of numbers as integers: two signed digits of 8 bits each, times a power of two for each group of 32.

The largest of a group has 14 bits, so what is lost is far below the rounding of a 16-bit number to its 8 or 11.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import PropagateNan

from headrace.kernels.triton.packed_ring_config import GROUP
from headrace.kernels.triton.row_of_codes import PAIR_PTX
from headrace.kernels.triton.weight_ring import FLAT, NUM_WARPS

_GROUP, _ALL = gl.constexpr(GROUP), gl.constexpr(PropagateNan.ALL)
_ROUND = gl.constexpr(12583040.0)
"""1.5 * 2 ** 23 + 128: a sum with it ends in the integer part, plus 128."""
_LEAST_EXPONENT = gl.constexpr(18)
"""Of a group's largest number, so that both powers of two are normal numbers."""
_PAIR = gl.constexpr(PAIR_PTX)


@gluon.constexpr_function
def _pieces(R):
    """Of a round: a warp has the inputs that it multiplies."""
    return gl.BlockedLayout([R.block_k // (32 * NUM_WARPS)], [32], [NUM_WARPS], [0])


@gluon.constexpr_function
def _halvings(count):
    return count.bit_length() - 1


@gluon.jit
def make_row(R: gl.constexpr):
    """(digits, powers of two, halves of sums) of a row in shared memory, [rounds, ...] each."""
    GROUPS: gl.constexpr = R.block_k // _GROUP
    digits = gl.allocate_shared_memory(gl.int16, [R.row_rounds, R.block_k], FLAT)
    powers = gl.allocate_shared_memory(gl.float32, [R.row_rounds, GROUPS], FLAT)
    sums = powers
    if R.has_minimums:
        sums = gl.allocate_shared_memory(gl.float32, [R.row_rounds, GROUPS], FLAT)
    return digits, powers, sums


@gluon.jit
def put_row(row, x, R: gl.constexpr):
    """x [a power of two] fp32 as a row's first numbers."""
    digits, powers, sums = row
    ROUNDS: gl.constexpr = x.shape[0] // R.block_k
    pieces = (x,)
    if ROUNDS > 1:
        pieces = (gl.convert_layout(x, _pieces(R)),)
    for level in gl.static_range(_halvings(ROUNDS)):
        pieces = _halves(pieces, 2**level)
    for round in gl.static_range(ROUNDS):
        _put((digits.index(round), powers.index(round), sums.index(round)), pieces[round], R)


@gluon.jit
def _halves(parts, COUNT: gl.constexpr):
    """Each [n] of a tuple as two of n / 2, in order."""
    found = ()
    for index in gl.static_range(COUNT):
        part = parts[index]
        first, second = gl.split(part.reshape([2, part.shape[0] // 2]).permute((1, 0)))
        found = found + (first, second)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def stage_row(row, x_ptr, PART: gl.constexpr, R: gl.constexpr):
    """The inputs of a product."""
    digits, powers, sums = row
    col = gl.arange(0, R.block_k, layout=_pieces(R))
    ROUNDS: gl.constexpr = R.rounds(PART)
    for round in gl.static_range(ROUNDS):
        x = gl.load(x_ptr + round * R.block_k + col).to(gl.float32)
        _put((digits.index(round), powers.index(round), sums.index(round)), x, R)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_ALL)


@gluon.jit
def _put(row, x, R: gl.constexpr):
    """A whole number of groups."""
    digits, powers, sums = row
    SIZE: gl.constexpr = x.shape[0]
    groups = x.reshape([SIZE // _GROUP, _GROUP])
    top = gl.reduce(gl.abs(groups), 1, _larger)
    exponent = gl.maximum(top.to(gl.int32, bitcast=True) >> 23, _LEAST_EXPONENT)
    up = ((267 - exponent) << 23).to(gl.float32, bitcast=True)
    down = ((exponent - 17) << 23).to(gl.float32, bitcast=True)  # and by 16: see ``row_of_codes``
    powers.store(gl.where(exponent == 255, float("nan"), down))
    integers = gl.fma(groups, gl.expand_dims(up, 1) + gl.full_like(groups, 0.0), gl.full_like(groups, _ROUND))
    integers = integers.to(gl.int32, bitcast=True).reshape([SIZE])
    pairs = gl.inline_asm_elementwise(_PAIR, "=r,r,r", [integers], dtype=gl.int16, is_pure=True, pack=2)
    digits.store(gl.convert_layout(pairs, x.type.layout, assert_trivial=True))
    if R.has_minimums:
        sums.store(gl.sum(groups, axis=1) * 0.5)
