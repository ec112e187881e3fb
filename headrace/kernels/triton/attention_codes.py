"""The kernel of short tiles over keys and values of 8 bits: what it reads ahead waits in registers, four codes a word.

A code passes through shared memory as a number anyway, on its way to the matrix units; passing there as a byte, too, is
what made 8 bits no faster to read than 16. Words are carried from round to round, and of a round's words each of the
four bytes makes a quarter of the numbers: those of dims 4 w + j. Queries are taken apart likewise, so the order of a
head's numbers does not matter to the products.

Legend: as in ``attention_kernels``; W words of a head: D / 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.attention_common import (
    FAR,
    HIDDEN,
    ITEM_SIZE,
    ITEMS_AT,
    KV_END,
    KV_START,
    NUM_SHORT,
    PARTIAL_START,
    REQUEST,
    ROW_COUNT,
    ROW_START,
    ROWS_AT,
    block_place,
    first_key,
    load_ids,
    load_queries,
    place_of,
    scaled,
    store_tile,
)
from headrace.kernels.triton.launch import IS_INTERPRETED, let_next_start, wait_for_previous


def _quarters(factor: str, bits: str, mask: str, *steps: str) -> tl.constexpr:
    """PTX that makes of two words ($4, $5) four pairs of bf16, a pair of each byte, in the steps.

    Registers: x holds the byte in both halves of each number, s is free; f the factor, b the bits, m the mask; z is
    -0.0 twice.
    """
    head = "{ .reg .b32 x, s, f, b, m, z;\n"
    head += f"mov.b32 f, {factor};\nmov.b32 b, {bits};\nmov.b32 m, {mask};\nmov.b32 z, 0x80008000;\n"
    parts = []
    for byte in range(4):
        parts.append(f"prmt.b32 x, $4, $5, 0x{4 + byte}{4 + byte}{byte}{byte};")
        parts += [step.replace("OUT", f"${byte}") for step in steps]
    return tl.constexpr(head + "\n".join(parts) + "\n}")


# 0x4300 is 128 in bf16, of which a byte's lower seven bits are the fraction; its sign bit makes 256 of it
_INT8 = _quarters(
    "0xbf80bf80",  # -1
    "0x43004300",
    "0x007f007f",
    "lop3.b32 s, x, 0x00800080, b, 0xEA;",  # (x & mask) | bits
    "lop3.b32 x, x, m, b, 0xEA;",
    "fma.rn.bf16x2 OUT, s, f, x;",
)


def _fp8(shift: int, mask: str, factor: str) -> tl.constexpr:
    """Exponent and fraction put where bf16 has them, times what lies between the two formats' exponents."""
    return _quarters(
        factor,
        "0",
        mask,
        "and.b32 s, x, 0x80008000;",
        f"shr.b32 x, x, {shift};",
        "lop3.b32 x, x, m, s, 0xEA;",
        "fma.rn.bf16x2 OUT, x, f, z;",
    )


_E4M3 = _fp8(4, "0x07f007f0", "0x7b807b80")  # 2^120
_E5M2 = _fp8(3, "0x0fe00fe0", "0x77807780")  # 2^112


@triton.jit
def _numbers(words, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """words [N, W] -> four times [N, W] numbers of ``dtype``, exactly.

    The assembly is called impure, so that Triton leaves it before the way through shared memory.
    """
    if IS_INTERPRETED:
        return (
            _byte(words, 0, FORMAT, dtype),
            _byte(words, 8, FORMAT, dtype),
            _byte(words, 16, FORMAT, dtype),
            _byte(words, 24, FORMAT, dtype),
        )
    else:
        PTX: tl.constexpr = _INT8 if FORMAT == "int8" else (_E4M3 if FORMAT == "fp8e4nv" else _E5M2)
        return tl.inline_asm_elementwise(
            PTX,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=False,
            pack=2,
        )


@triton.jit
def _byte(words, SHIFT: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """One byte of each word as a number, where there is no PTX."""
    codes = (words >> SHIFT).to(tl.int8)
    if FORMAT == "fp8e4nv":
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FORMAT == "fp8e5":
        return codes.to(tl.float8e5, bitcast=True).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def _load_words(start, place, inside, word, C: tl.constexpr):
    """[N, W] words; as numbers codes are finite, whatever they are, so those outside of the keys need no mask."""
    if IS_INTERPRETED:  # but not where a format's own conversion makes numbers of them
        mask = inside[:, None] & (word < C.head_dim // 4)[None, :]
        return tl.load(start + place, mask=mask, other=0)
    elif C.block_d != C.head_dim:
        return tl.load(start + place, mask=(word < C.head_dim // 4)[None, :], other=0)
    else:
        return tl.load(start + place)


@triton.jit
def _load_round(
    k_ptr, v_ptr, k_scales, v_scales, blocks, first, start, end, word_stride, scales_stride, C: tl.constexpr,
):  # fmt: skip
    """(words of k [N, W], of v, scale of each k [N], of v) of the keys from ``first`` on; scales 0 outside."""
    lane = tl.arange(0, C.block_n)
    word = tl.arange(0, C.block_d // 4)
    key = first + lane
    inside = key < end
    if C.has_window:
        inside = inside & (key >= start)
    key_slot = (lane if C.has_whole_blocks else key) % C.block_size
    slot = block_place(blocks, scales_stride) + key_slot
    k_scale = tl.load(k_scales + slot, mask=inside, other=0.0)
    v_scale = tl.load(v_scales + slot, mask=inside, other=0.0)
    place = block_place(blocks, word_stride)
    if C.has_whole_blocks:  # the pointers are those of the lanes' slots
        k = _load_words(k_ptr, place[:, None], inside, word, C)
        v = _load_words(v_ptr, place[:, None], inside, word, C)
    else:
        k = _load_words(k_ptr, (place + key_slot * (C.k_size // 4))[:, None] + word[None, :], inside, word, C)
        v = _load_words(v_ptr, (place + key_slot * (C.v_size // 4))[:, None] + word[None, :], inside, word, C)
    return k, v, k_scale, v_scale


@triton.jit
def _fold(
    q0, q1, q2, q3, top, total, acc0, acc1, acc2, acc3, k, v, k_scale, v_scale, first, start, end, positions, lowest,
    scale, soft_cap, window, FORMAT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One round of the online softmax: (top [M], total [M], four quarters of acc [M, W])."""
    k0, k1, k2, k3 = _numbers(k, FORMAT, q0.dtype)
    product = tl.dot(q0, tl.trans(k0))
    product = tl.dot(q1, tl.trans(k1), product)
    product = tl.dot(q2, tl.trans(k2), product)
    product = tl.dot(q3, tl.trans(k3), product)
    score = scaled(product * k_scale[None, :], scale, soft_cap, C)
    if C.has_window or first + C.block_n > tl.minimum(end, lowest + 1):
        key = first + tl.arange(0, C.block_n)
        is_seen = (key[None, :] <= positions[:, None]) & ((key >= start) & (key < end))[None, :]
        if C.has_window:
            is_seen = is_seen & (key[None, :] > positions[:, None] - window)
        score = tl.where(is_seen, score, HIDDEN)
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, axis=1)
    weight = (weight * v_scale[None, :]).to(q0.dtype)
    v0, v1, v2, v3 = _numbers(v, FORMAT, q0.dtype)
    acc0 = tl.dot(weight, v0, acc0 * shrink[:, None])
    acc1 = tl.dot(weight, v1, acc1 * shrink[:, None])
    acc2 = tl.dot(weight, v2, acc2 * shrink[:, None])
    acc3 = tl.dot(weight, v3, acc3 * shrink[:, None])
    return new_top, total, acc0, acc1, acc2, acc3


@triton.jit
def _store(
    acc0, acc1, acc2, acc3, top, total, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row, head, is_row,
    partial, word, C: tl.constexpr,
):  # fmt: skip
    """A tile's quarters to their dims."""
    store_tile(
        acc0, top, total, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row, head, is_row, partial,
        4 * word, C,
    )  # fmt: skip
    store_tile(
        acc1, top, total, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row, head, is_row, partial,
        4 * word + 1, C,
    )  # fmt: skip
    store_tile(
        acc2, top, total, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row, head, is_row, partial,
        4 * word + 2, C,
    )  # fmt: skip
    store_tile(
        acc3, top, total, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row, head, is_row, partial,
        4 * word + 3, C,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "window"])
def coded_tiles_kernel(
    qkv_ptr, k_ptr, v_ptr, out_ptr, partials_ptr, log_sums_ptr, table_ptr, plan_ptr,
    qkv_stride, out_stride, table_stride, word_stride, scale, soft_cap, window,
    k_scales_ptr, v_scales_ptr, scales_stride, FORMAT: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The short items of a cache of 8 bits, of which k_ptr and v_ptr are int32 words; FORMAT: of a code."""
    let_next_start(PDL)
    m = tl.arange(0, C.block_m)
    row = m // C.group
    word = tl.arange(0, C.block_d // 4)
    wait_for_previous(PDL)
    rows_ptr = plan_ptr + tl.load(plan_ptr + ROWS_AT)
    items_ptr = plan_ptr + tl.load(plan_ptr + ITEMS_AT)
    num_units = tl.load(plan_ptr + NUM_SHORT) * C.num_kv_heads
    for turn in range(tl.cdiv(num_units, tl.num_programs(0))):
        place = place_of(turn)
        unit = tl.minimum(place, num_units - 1)
        item = items_ptr + (unit // C.num_kv_heads) * ITEM_SIZE
        kv_head = unit % C.num_kv_heads
        table = table_ptr + tl.load(item + REQUEST).to(tl.int64) * table_stride
        start = tl.load(item + KV_START)
        end = tl.where(place < num_units, tl.load(item + KV_END), 0)
        is_row = (row < tl.load(item + ROW_COUNT)) & (place < num_units)
        head = kv_head * C.group + m % C.group
        first_row = tl.load(item + ROW_START)
        token, positions, q0 = load_queries(
            qkv_ptr, qkv_stride, rows_ptr, first_row, row, head, is_row, 4 * word, C
        )
        _, _, q1 = load_queries(qkv_ptr, qkv_stride, rows_ptr, first_row, row, head, is_row, 4 * word + 1, C)
        _, _, q2 = load_queries(qkv_ptr, qkv_stride, rows_ptr, first_row, row, head, is_row, 4 * word + 2, C)
        _, _, q3 = load_queries(qkv_ptr, qkv_stride, rows_ptr, first_row, row, head, is_row, 4 * word + 3, C)
        top = tl.full([C.block_m], HIDDEN, tl.float32)
        total = tl.full([C.block_m], 0.0, tl.float32)
        acc0 = tl.full([C.block_m, C.block_d // 4], 0.0, tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        k_start = k_ptr + kv_head * (C.k_stride // 4)
        v_start = v_ptr + kv_head * (C.v_stride // 4)
        k_scales = k_scales_ptr + kv_head * C.k_plane_scales
        v_scales = v_scales_ptr + kv_head * C.v_plane_scales
        lowest = tl.min(tl.where(is_row, positions, FAR))
        begin = first_key(start, C)
        if C.has_whole_blocks:
            slot = tl.arange(0, C.block_n)[:, None] % C.block_size
            k_start = k_start + (slot * (C.k_size // 4) + word[None, :])
            v_start = v_start + (slot * (C.v_size // 4) + word[None, :])
        blocks = load_ids(table, begin, end, C, True)
        k, v, k_scale, v_scale = _load_round(
            k_start, v_start, k_scales, v_scales, blocks, begin, start, end, word_stride, scales_stride, C
        )
        blocks = load_ids(table, begin + C.block_n, end, C, True)
        for first in tl.range(begin, end, C.block_n, num_stages=1):
            next_k, next_v, next_k_scale, next_v_scale = _load_round(
                k_start, v_start, k_scales, v_scales, blocks, first + C.block_n, start, end, word_stride,
                scales_stride, C,
            )  # fmt: skip
            blocks = load_ids(table, first + 2 * C.block_n, end, C, True)
            top, total, acc0, acc1, acc2, acc3 = _fold(
                q0, q1, q2, q3, top, total, acc0, acc1, acc2, acc3, k, v, k_scale, v_scale, first, start, end,
                positions, lowest, scale, soft_cap, window, FORMAT, C,
            )  # fmt: skip
            k, v, k_scale, v_scale = next_k, next_v, next_k_scale, next_v_scale
        partial = tl.load(item + PARTIAL_START)
        _store(
            acc0, acc1, acc2, acc3, top, total, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row, head,
            is_row, partial, word, C,
        )  # fmt: skip
