"""Small integers packed into 32-bit words, as the GPTQ, AWQ and compressed-tensors formats have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.affine_matrix import AffineMatrix, GroupScales
from headrace.quant.rounding import exact_scales


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """words int32 [n, w] -> uint8 [n, w * 32 / bits], the lowest bits first.

    Args:
        bits: 4 or 8.
        order: which field of a word each number is in; None: one after the other.
    """
    # A column by itself passes for contiguous whatever its stride, but cannot be viewed as bytes.
    fields = words.reshape(-1).contiguous().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        fields = torch.stack((fields & 15, fields >> 4), dim=-1).flatten(-2)
    if order is None:
        return fields
    per_word = 32 // bits
    return fields.view(len(words), -1, per_word)[..., list(order)].reshape(len(words), -1)


def affine_from_zero_points(
    codes: Tensor, bits: int, group_columns: int, scales: Tensor, zero_points: Tensor | None
) -> AffineMatrix:
    """The matrix scale * (code - zero point), exactly.

    Args:
        codes: uint8 [n, in], below 2^bits.
        scales: [n, G] of any float type.
        zero_points: [n, G] integers; None: 2^(bits-1) everywhere.
    """
    middle = 1 << (bits - 1)
    exact = exact_scales(scales.float())
    stored = (codes ^ 128).view(torch.int8) if bits == 8 else codes
    if zero_points is None or bool((zero_points == middle).all()):
        return AffineMatrix(stored, bits, group_columns, exact)
    offset = zero_points.float() - (middle if bits == 8 else 0)
    minimums: GroupScales = exact_scales(scales.float() * -offset)
    return AffineMatrix(stored, bits, group_columns, exact, minimums)


def check_config(known: dict[str, tuple[object, ...]], found: dict[str, object], method: str) -> str | None:
    """What is wrong with a configuration: a sentence that names the value and those known; None: nothing."""
    for name, values in known.items():
        if found[name] not in values:
            return f"{method} with {name}={found[name]!r} is not supported (known: {', '.join(map(repr, values))})"
    return None
