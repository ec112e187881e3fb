"""Encoding and decoding of ``QuantizedCache`` within kernels.

Legend: N keys, M query rows, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.quantized_cache import QuantizedCache

KIND_NAMES = {"int8": "int8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "int4": "int4"}
"""Format -> how kernels treat it."""


def cache_arguments(
    cache: torch.Tensor | QuantizedCache,
) -> tuple[torch.Tensor, torch.Tensor, str, float]:
    """(codes, scales, kind, largest code) of a layer's keys or values; dense ones have no kind."""
    if isinstance(cache, torch.Tensor):
        return cache, cache, "", 0.0
    kind = KIND_NAMES[cache.format.name]
    words = cache.words.view(torch.float16) if kind == "int4" else cache.words
    return cache.codes, words, kind, cache.format.largest


def cache_geometry(codes: torch.Tensor, words: torch.Tensor, kind: str) -> dict[str, Any]:
    """What ``TileConfig`` needs to know of a quantized cache; nothing for a dense one."""
    if not kind:
        return {}
    return {"kv_kind": kind, "plane_codes": codes.stride(1), "plane_scales": words.stride(1)}


@triton.jit
def decode_int4(codes, scales_ptr, slot, dim, inside, HALF_DIM: tl.constexpr):
    """codes [N, D], each byte loaded for both of its elements -> fp32 [N, D]; zeros where not ``inside``."""
    scale = tl.load(scales_ptr + 2 * slot, mask=inside, other=0.0).to(tl.float32)
    minimum = tl.load(scales_ptr + 2 * slot + 1, mask=inside, other=0.0).to(tl.float32)
    number = (codes.to(tl.int32) >> (4 * (dim // HALF_DIM))[None, :]) & 15
    return number.to(tl.float32) * scale[:, None] + minimum[:, None]


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
    if KIND == "int4":
        far = 3.0e38
        low = tl.min(tl.where(in_half[None, :], tl.minimum(first, second), far), axis=1)
        high = tl.max(tl.where(in_half[None, :], tl.maximum(first, second), -far), axis=1)
        minimum = low.to(tl.float16)
        scale = (tl.maximum(high - minimum.to(tl.float32), 0.0) / 15.0).to(tl.float16)
        wide = scale.to(tl.float32)
        inverse = tl.where(wide > 0.0, 1.0 / tl.where(wide > 0.0, wide, 1.0), 0.0)
        shift = minimum.to(tl.float32)[:, None]
        low_code = _rounded((first - shift) * inverse[:, None], 0.0, 15.0).to(tl.uint8)
        high_code = _rounded((second - shift) * inverse[:, None], 0.0, 15.0).to(tl.uint8)
        tl.store(place, low_code | (high_code << 4), mask=inside)
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
def _rounded(x, low, high):
    """To the nearest integer within [low, high]."""
    return tl.floor(tl.minimum(tl.maximum(x, low), high) + 0.5)
