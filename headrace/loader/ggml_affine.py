"""ggml blocks as an AffineMatrix, exactly: codes, scales and minimums are taken over, nothing is rounded.

Block layouts: ggml-quants.h of llama.cpp; see also ``ggml_dequantize``, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.checkpoint.gguf_types import BLOCK_SIZES, GGMLType
from headrace.kernels.affine_matrix import AffineMatrix, GroupScales
from headrace.loader.ggml_dequantize import six_bit_scales
from headrace.loader.weight_data import PackedBlocks


def is_affine(ggml_type: GGMLType) -> bool:
    """Whether ``affine_matrix`` knows this type."""
    return ggml_type in _READERS


def affine_matrix(packed: PackedBlocks) -> AffineMatrix:
    """The matrix [rows, columns] in those blocks."""
    num_rows = packed.shape[0]
    blocks = packed.data.reshape(num_rows, -1, BLOCK_SIZES[packed.ggml_type][1])
    return _READERS[packed.ggml_type](blocks)


def _half(blocks: Tensor, at: int) -> Tensor:
    """[n, blocks, bytes] -> the fp16 number at byte ``at`` of each block, [n, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(quants: Tensor) -> Tensor:
    """[..., k] -> [..., 2k]: the low nibbles, then the high ones; four bytes at a time."""
    places = (quants.storage_offset(), *quants.stride()[:-1])
    words = quants if all(place % 4 == 0 for place in places) else quants.contiguous()
    words = words.view(torch.int32)
    both = words.new_empty((*words.shape[:-1], 2, words.shape[-1]))
    torch.bitwise_and(words, 0x0F0F0F0F, out=both[..., 0, :])
    torch.bitwise_and(words >> 4, 0x0F0F0F0F, out=both[..., 1, :])
    return both.flatten(-2).view(torch.uint8)


def _fifth_bits(high: Tensor) -> Tensor:
    """[..., 4] bytes, one bit a number, lowest first -> [..., 32], 16 where the bit is set."""
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu")
    return (((high.unsqueeze(-1) >> shifts) & 1) << 4).flatten(-2)


def _matrix(
    codes: Tensor, bits: int, group: int, scales: GroupScales, minimums: GroupScales | None = None
) -> AffineMatrix:
    return AffineMatrix(codes.reshape(len(codes), -1), bits, group, scales, minimums)


def _q4_0(blocks: Tensor) -> AffineMatrix:
    return _matrix(_nibbles(blocks[..., 2:]), 4, 32, GroupScales(_half(blocks, 0)))


def _q4_1(blocks: Tensor) -> AffineMatrix:
    scales, minimums = GroupScales(_half(blocks, 0)), GroupScales(_half(blocks, 2))
    return _matrix(_nibbles(blocks[..., 4:]), 4, 32, scales, minimums)


def _q5_0(blocks: Tensor) -> AffineMatrix:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _matrix(codes, 5, 32, GroupScales(_half(blocks, 0)))


def _q5_1(blocks: Tensor) -> AffineMatrix:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _matrix(codes, 5, 32, GroupScales(_half(blocks, 0)), GroupScales(_half(blocks, 2)))


def _q8_0(blocks: Tensor) -> AffineMatrix:
    return _matrix(blocks[..., 2:].contiguous().view(torch.int8), 8, 32, GroupScales(_half(blocks, 0)))


def _two_levels(blocks: Tensor) -> tuple[GroupScales, GroupScales]:
    """Scales and minimums of Q4_K and Q5_K; minimums are subtracted there and added here."""
    scales, minimums = six_bit_scales(blocks[..., 4:16].reshape(-1, 12))
    num_rows = len(blocks)
    return (
        GroupScales(scales.view(num_rows, -1).view(torch.int8), _half(blocks, 0)),
        GroupScales(minimums.view(num_rows, -1).view(torch.int8), -_half(blocks, 2)),
    )


def _q4_k(blocks: Tensor) -> AffineMatrix:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return _matrix(codes, 4, 32, *_two_levels(blocks))


def _q5_k(blocks: Tensor) -> AffineMatrix:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu").view(8, 1)
    high = ((blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1) << 4
    return _matrix(low | high, 5, 32, *_two_levels(blocks))


def _q6_k(blocks: Tensor) -> AffineMatrix:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu").view(4, 1)
    high = ((blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3) << 4
    scales = blocks[..., 192:208].reshape(len(blocks), -1).view(torch.int8)
    codes = low.unflatten(-1, (4, 32)) | high
    return _matrix(codes, 6, 16, GroupScales(scales, _half(blocks, 208)))


_READERS: dict[GGMLType, Callable[[Tensor], AffineMatrix]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
