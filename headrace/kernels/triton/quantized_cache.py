"""Encoding and decoding of ``QuantizedCache`` within kernels.

Legend: N keys, M query rows, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.quantized_cache import QuantizedCache

KIND_NAMES = {"int8": "int8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "int4": "int4", "int5": "int5"}
"""Format -> how kernels treat it."""

PAIRED_KINDS = ("int5", "int4")
"""Of keys and of values whose scales are pairs of fp16, scale and minimum."""


def cache_arguments(
    cache: torch.Tensor | QuantizedCache,
) -> tuple[torch.Tensor, torch.Tensor, str, float]:
    """(codes, scales, kind, largest code) of a layer's keys or values; dense ones have no kind."""
    if isinstance(cache, torch.Tensor):
        return cache, cache, "", 0.0
    kind = KIND_NAMES[cache.format.name]
    words = cache.words.view(torch.float16) if kind in PAIRED_KINDS else cache.words
    return cache.codes, words, kind, cache.format.largest


def cache_geometry(
    keys: tuple[torch.Tensor, torch.Tensor], values: tuple[torch.Tensor, torch.Tensor], kinds: tuple[str, str]
) -> dict[str, Any]:
    """What ``TileConfig`` needs to know of quantized keys and values, (codes, scales) each; nothing for dense ones."""
    if not kinds[0]:
        return {}
    is_packed = kinds == PAIRED_KINDS
    assert is_packed or kinds[0] == kinds[1], kinds
    found: dict[str, Any] = {"kv_kind": "packed" if is_packed else kinds[0]}
    for name, (codes, words) in zip(("k", "v"), (keys, values), strict=True):
        found[f"{name}_token"] = codes.shape[-1]
        found[f"{name}_plane_codes"] = codes.stride(1)
        found[f"{name}_plane_scales"] = words.stride(1)
    return found


@triton.jit
def decode_packed(
    codes, fifths, scales_ptr, slot, dim, inside, HALF_DIM: tl.constexpr, HAS_FIFTH: tl.constexpr
):
    """codes, and fifths if there are any, [N, D]: each byte loaded for all of its elements -> fp32 [N, D].

    Zeros where not ``inside``.
    """
    scale = tl.load(scales_ptr + 2 * slot, mask=inside, other=0.0).to(tl.float32)
    minimum = tl.load(scales_ptr + 2 * slot + 1, mask=inside, other=0.0).to(tl.float32)
    half = dim // HALF_DIM
    number = (codes.to(tl.int32) >> (4 * half)[None, :]) & 15
    if HAS_FIFTH:
        place = 4 * half + (dim % HALF_DIM) % 4
        number += ((fifths.to(tl.int32) >> place[None, :]) & 1) << 4
    return number.to(tl.float32) * scale[:, None] + minimum[:, None]


@triton.jit
def hadamard_halves(first, second, HALF: tl.constexpr):
    """``hadamard`` of heads in halves [heads, D/2 padded to a power of two] fp32."""
    PIECE: tl.constexpr = HALF & -HALF
    factor: tl.constexpr = (2 * PIECE) ** -0.5
    return (
        _turned((first + second) * factor, PIECE),
        _turned((first - second) * factor, PIECE),
    )


@triton.jit
def _turned(x, PIECE: tl.constexpr):
    """The unscaled transform of each ``PIECE`` numbers of a row: sums and differences of neighbours, all sums first, as
    often as halving takes (Pease's constant geometry)."""
    ROWS: tl.constexpr = x.shape[0] * x.shape[1] // PIECE
    rows = tl.reshape(x, [ROWS, PIECE])
    for level in tl.static_range(0, 8):
        if (2 << level) <= PIECE:
            low, high = tl.split(tl.reshape(rows, [ROWS, PIECE // 2, 2]))
            rows = tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 2, 1]), [ROWS, PIECE])
    return tl.reshape(rows, [x.shape[0], x.shape[1]])


@triton.jit
def store_quantized(
    first, second, codes_ptr, scales_ptr, code_place, slot_place, mask, in_half,
    KIND: tl.constexpr, LARGEST: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Both halves of heads [heads, D/2] fp32 into the codes and scales of their slots.

    code_place, slot_place: [heads] where a head's codes begin, and its scale is.
    mask: [heads].
    """
    dim = tl.arange(0, first.shape[1])
    inside = mask[:, None] & in_half[None, :]
    place = codes_ptr + code_place[:, None] + dim[None, :]
    if (KIND == "int4") | (KIND == "int5"):
        far = 3.0e38
        low = tl.min(tl.where(in_half[None, :], tl.minimum(first, second), far), axis=1)
        high = tl.max(tl.where(in_half[None, :], tl.maximum(first, second), -far), axis=1)
        minimum = low.to(tl.float16)
        scale = (tl.maximum(high - minimum.to(tl.float32), 0.0) / LARGEST).to(tl.float16)
        wide = scale.to(tl.float32)
        inverse = tl.where(wide > 0.0, 1.0 / tl.where(wide > 0.0, wide, 1.0), 0.0)
        shift = minimum.to(tl.float32)[:, None]
        low_code = _rounded((first - shift) * inverse[:, None], 0.0, LARGEST).to(tl.int32)
        high_code = _rounded((second - shift) * inverse[:, None], 0.0, LARGEST).to(tl.int32)
        tl.store(place, ((low_code & 15) | ((high_code & 15) << 4)).to(tl.uint8), mask=inside)
        if KIND == "int5":
            _store_fifths((low_code >> 4) | (high_code >> 4) << 4, codes_ptr + code_place + HALF, mask, HALF)
        tl.store(scales_ptr + 2 * slot_place, scale, mask=mask)
        tl.store(scales_ptr + 2 * slot_place + 1, minimum, mask=mask)
    else:
        largest = tl.maximum(tl.abs(first), tl.abs(second))
        most = tl.max(tl.where(in_half[None, :], largest, 0.0), axis=1)
        inverse = tl.where(most > 0.0, LARGEST / tl.where(most > 0.0, most, 1.0), 0.0)[:, None]
        dtype = codes_ptr.dtype.element_ty
        if KIND == "int8":
            tl.store(place, _rounded(first * inverse, -LARGEST, LARGEST).to(dtype), mask=inside)
            tl.store(place + HALF, _rounded(second * inverse, -LARGEST, LARGEST).to(dtype), mask=inside)
        else:
            low = tl.minimum(tl.maximum(first * inverse, -LARGEST), LARGEST)
            high = tl.minimum(tl.maximum(second * inverse, -LARGEST), LARGEST)
            tl.store(place, low.to(dtype), mask=inside)
            tl.store(place + HALF, high.to(dtype), mask=inside)
        tl.store(scales_ptr + slot_place, most / LARGEST, mask=mask)


@triton.jit
def _store_fifths(bits, targets, mask, HALF: tl.constexpr):
    """bits [heads, D/2 padded]: the first half's fifth bits in bit 0, the second's in bit 4; four elements a byte."""
    HEADS: tl.constexpr = bits.shape[0]
    NUM_BYTES: tl.constexpr = bits.shape[1] // 4
    fours = tl.reshape(bits, [HEADS, NUM_BYTES, 4])
    byte = tl.sum(fours << tl.arange(0, 4)[None, None, :], axis=2)
    index = tl.arange(0, NUM_BYTES)
    inside = mask[:, None] & (index < HALF // 4)[None, :]
    tl.store(targets[:, None] + index[None, :], byte.to(tl.uint8), mask=inside)


@triton.jit
def _rounded(x, low, high):
    """To the nearest integer within [low, high]."""
    return tl.floor(tl.minimum(tl.maximum(x, low), high) + 0.5)
