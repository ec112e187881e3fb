"""Tiles of packed weights in the ring: what they are, and which of them a layer's matrices take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import triton
from triton.experimental.gluon import language as gl

from headrace.kernels.triton import row_of_codes, weight_ring
from headrace.kernels.triton.row_of_codes import product_ptx
from headrace.kernels.triton.source_digest import digest_of
from headrace.kernels.triton.weight_ring import NUM_WARPS, RingConfig
from headrace.kernels.triton.word_matrix import CHUNK_WORDS, WordMatrix

BAND = 16
"""Rows that the matrix units multiply at a time."""
GROUP = 32
"""Inputs whose sum a column has; scales are of as many or of multiples."""
CHUNK = 8 * CHUNK_WORDS
"""Inputs of a chunk of words."""
COPY_WARPS, COPY_REGISTERS = 4, 56
"""That copy tiles, besides those that multiply; and of each of their threads."""
_TILE_COST = 16384
"""What taking a tile costs besides, in numbers multiplied."""


@dataclass(frozen=True, slots=True)
class PackedRingConfig(RingConfig):
    """The tiles of packed weights.

    group: inputs of a scale, a multiple of 32; 0: all.
    scale_bytes: of one scale.
    strides: of each matrix's scales, from one group's to the next.
    scales_after, minimums_after: bytes from where each matrix's words begin to its scales and minimums.
    """

    group: int = GROUP
    scale_bytes: int = 2
    has_minimums: bool = False
    strides: tuple[int, ...] = ()
    scales_after: tuple[int, ...] = ()
    minimums_after: tuple[int, ...] = ()
    sources: str = field(
        default=digest_of(__file__, row_of_codes.__file__, weight_ring.__file__), kw_only=True
    )

    @property
    def is_packed(self) -> bool:
        return True

    @property
    def chunks(self) -> int:
        """Of a warp in a tile, 1 or 2."""
        return self.block_k // (NUM_WARPS * CHUNK)

    @property
    def bands(self) -> int:
        """Of 16 rows in a tile, 1 or 2."""
        return self.num_rows // BAND

    @property
    def blocks(self) -> int:
        """Of a band and a chunk, that a warp multiplies of a tile."""
        return self.bands * self.chunks

    @property
    def lane_rows(self) -> int:
        """Neighbouring rows whose numbers a thread has; in each band two, 8 apart for the matrix units."""
        return 2 * self.bands

    @property
    def piece_rows(self) -> int:
        """Of a tile, that threads copy at once."""
        return COPY_WARPS * 128 // (self.block_k // 8)

    @property
    def groups(self) -> int:
        """Of 32 inputs that a warp has of a tile, 4 or 8."""
        return self.chunks * CHUNK // GROUP

    @property
    def row_rounds(self) -> int:
        """Of ``block_k`` inputs, for which there is room: as many as a product has, or a norm's power of two."""
        padded = triton.next_power_of_2(self.inputs[0]) // self.block_k
        return int(max(padded, *(self.rounds(part) for part in range(4))))

    @property
    def row_bytes(self) -> int:
        """Of a product's inputs, in digits."""
        return self.row_rounds * self.block_k // GROUP * (2 * GROUP + (8 if self.has_minimums else 4))

    @property
    def slot_bytes(self) -> int:
        """Of a tile with its scales."""
        scales = NUM_WARPS * self.groups * self.num_rows * self.scale_bytes
        return self.num_rows * self.block_k // 2 + scales * (2 if self.has_minimums else 1)

    @property
    def product_ptx(self) -> str:
        """See ``row_of_codes``."""
        return product_ptx(self.chunks, self.bands, self.has_minimums)

    @property
    def product_constraints(self) -> str:
        """Of the operands of ``product_ptx``."""
        operands = 2 * self.blocks + self.chunks + 1
        return ",".join(["=&f"] * 4 * self.blocks + ["r"] * 4 * operands)

    @property
    def product_types(self) -> tuple[gl.dtype, ...]:
        """Of its results."""
        return (gl.float32,) * self.blocks


def packed_ring_config(
    matrices: Sequence[WordMatrix],
    outputs: Sequence[int],
    inputs: Sequence[int],
    num_programs: int,
    num_bytes: int,
) -> PackedRingConfig | None:
    """Tiles of a layer's four matrices; None: they are of other bits or groups, or sizes that no tile fits.

    num_bytes: of shared memory for the ring and for the inputs of a product.
    """
    first = matrices[0]
    is_whole = all(matrix.group_columns >= matrix.num_columns for matrix in matrices)
    group = 0 if is_whole else first.group_columns
    forms = {
        (m.bits, 0 if is_whole else m.group_columns, m.scales.dtype, m.minimums is None) for m in matrices
    }
    if len(forms) > 1 or first.bits != 4 or group % GROUP or not all(m.is_in_one_piece for m in matrices):
        return None
    block_k = next((size for size in (2048, 1024) if all(k % size == 0 for k in inputs)), None)
    if block_k is None:
        return None
    configs = []
    for num_rows in (2 * BAND, BAND):
        config = PackedRingConfig(
            num_rows,
            block_k,
            0,
            tuple(outputs),
            tuple(inputs),
            group,
            first.scales.element_size(),
            first.minimums is not None,
            tuple(matrix.scales.stride(0) for matrix in matrices),
            tuple(matrix.scales_after for matrix in matrices),
            tuple(matrix.minimums_after for matrix in matrices),
        )
        num_slots = (num_bytes - config.row_bytes) // config.slot_bytes
        if num_slots >= 3 and all(n % config.lines(part) == 0 for part, n in enumerate(outputs)):
            configs.append(replace(config, num_slots=num_slots))
    return min(configs, key=lambda config: _work(config, num_programs), default=None)


def _work(config: PackedRingConfig, num_programs: int) -> int:
    """Numbers that the busiest program multiplies of a layer, and what a tile takes besides."""
    return config.per_layer(num_programs) * (config.num_rows * config.block_k + _TILE_COST)
