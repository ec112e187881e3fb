"""TiledMatrix: an AffineMatrix as the native kernels read it, 8 rows side by side (csrc/packed/packed.h)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.affine_matrix import BLOCK_COLUMNS, AffineMatrix, GroupScales
from headrace.kernels.native.structs import PackedMatrixStruct
from headrace.kernels.native.weight_memory import WEIGHT_MEMORY

_TILE_ROWS = 8
_SCALE_KINDS = {torch.float32: 0, torch.float16: 1, torch.int8: 2}


@dataclass(frozen=True, slots=True, eq=False)
class TiledMatrix:
    """Attributes:
    codes: uint8, see the C header.
    scales, minimums: values [tiles, G, 8], supers [tiles, columns / 256, 8].
    struct: the same for C; it points into the tensors.
    """

    num_rows: int
    num_columns: int
    bits: int
    group_columns: int
    codes: Tensor
    scales: GroupScales
    minimums: GroupScales | None
    struct: PackedMatrixStruct = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Of codes and scales."""
        minimums = [] if self.minimums is None else self.minimums.tensors()
        return sum(tensor.nbytes for tensor in (self.codes, *self.scales.tensors(), *minimums))

    @classmethod
    def pack(cls, matrix: AffineMatrix) -> TiledMatrix:
        """Packs a matrix on the CPU. Groups are of 16 columns (without minimums), of multiples of 32, or of all."""
        rest = -matrix.num_columns % BLOCK_COLUMNS
        codes = _padded(matrix.codes.view(torch.uint8), rest)
        group = min(matrix.group_columns, codes.shape[1])
        if group == matrix.num_columns:  # one group a row, which takes in the padding
            group = codes.shape[1]
        assert group % BLOCK_COLUMNS == 0 or (group == 16 and matrix.minimums is None), (
            f"groups of {group} columns"
        )
        tiled = WEIGHT_MEMORY.keep(_tile_codes(codes, matrix.bits))
        minimums = matrix.minimums
        is_mixed = minimums is not None and minimums.values.dtype != matrix.scales.values.dtype
        scales = _tile_scales(_wide(matrix.scales) if is_mixed else matrix.scales)
        if minimums is not None:
            minimums = _tile_scales(_wide(minimums) if is_mixed else minimums)
        struct = PackedMatrixStruct(
            tiled.data_ptr(),
            scales.values.data_ptr(),
            None if minimums is None else minimums.values.data_ptr(),
            None if scales.supers is None else scales.supers.data_ptr(),
            None if minimums is None or minimums.supers is None else minimums.supers.data_ptr(),
            matrix.num_rows,
            codes.shape[1] // BLOCK_COLUMNS,
            matrix.bits,
            group,
            _SCALE_KINDS[scales.values.dtype],
            0,
        )
        shape = (matrix.num_rows, matrix.num_columns)
        return cls(*shape, matrix.bits, group, tiled, scales, minimums, struct)


def _padded(values: Tensor, num_columns: int = 0) -> Tensor:
    """values [n, w] with zero rows up to whole tiles and more zero columns; itself where it needs none."""
    num_rows = -len(values) % _TILE_ROWS
    return F.pad(values, (0, num_columns, 0, num_rows)) if num_rows or num_columns else values


def _wide(scales: GroupScales) -> GroupScales:
    return GroupScales(scales.widen())


def _tile_codes(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [n, in], whole tiles and blocks -> uint8 [tiles, blocks, bytes of a block]."""
    num_tiles, num_blocks = codes.shape[0] // _TILE_ROWS, codes.shape[1] // BLOCK_COLUMNS
    # four columns are one 32-bit word, which moves as a whole: [tile, row, block, chunk] -> [tile, block, chunk, row]
    words = codes.contiguous().view(torch.int32).view(num_tiles, _TILE_ROWS, num_blocks, 8)
    if bits == 4:  # half the words to move
        halves = words[..., :4] | (words[..., 4:] << 4)
        return halves.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(num_tiles, num_blocks, -1)
    chunks = words.permute(0, 2, 3, 1).contiguous()
    if bits == 8:
        return chunks.view(torch.uint8).view(num_tiles, num_blocks, -1)
    low = chunks & 0x0F0F0F0F
    parts = [low[:, :, :4] | (low[:, :, 4:] << 4)]
    high = (chunks >> 4) & (0x01010101 if bits == 5 else 0x03030303)
    if bits == 5:
        parts.append(_merge_bits(high, 1))
    else:
        parts += [_merge_bits(high[:, :, :4], 2), _merge_bits(high[:, :, 4:], 2)]
    return torch.cat([part.reshape(num_tiles, num_blocks, -1) for part in parts], dim=2).view(torch.uint8)


def _merge_bits(high: Tensor, width: int) -> Tensor:
    """high [tiles, blocks, chunks, 8] words with ``width`` bits in each byte -> one word with all chunks' bits."""
    merged = high[:, :, 0].clone()
    for chunk in range(1, high.shape[2]):
        merged |= high[:, :, chunk] << (width * chunk)
    return merged


def _tile_scales(scales: GroupScales) -> GroupScales:
    supers = None if scales.supers is None else _tiled(scales.supers)
    return GroupScales(_tiled(scales.values), supers)


def _tiled(values: Tensor) -> Tensor:
    """[n, G] -> [tiles, G, 8]."""
    padded = _padded(values)
    return WEIGHT_MEMORY.keep(padded.view(-1, _TILE_ROWS, values.shape[1]).transpose(1, 2))
