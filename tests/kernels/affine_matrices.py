"""Random matrices of small integers, of every kind that formats lead to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.affine_matrix import AffineMatrix, GroupScales


@dataclass(frozen=True)
class Kind:
    """What a matrix is like. group: columns of a scale; None: all."""

    bits: int
    group: int | None = 32
    has_minimums: bool = False
    has_two_levels: bool = False
    scale_dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        parts = [f"{self.bits}bit", f"g{self.group}", str(self.scale_dtype).removeprefix("torch.float")]
        return "-".join(parts + ["min"] * self.has_minimums + ["two"] * self.has_two_levels)


KINDS = [
    Kind(4),  # Q4_0
    Kind(4, has_minimums=True),  # Q4_1
    Kind(5),  # Q5_0
    Kind(5, has_minimums=True),  # Q5_1
    Kind(8),  # Q8_0
    Kind(4, has_minimums=True, has_two_levels=True),  # Q4_K
    Kind(5, has_minimums=True, has_two_levels=True),  # Q5_K
    Kind(6, group=16, has_two_levels=True),  # Q6_K
    Kind(4, group=128, has_minimums=True, scale_dtype=torch.float32),
    Kind(4, group=64),
    Kind(8, group=None, scale_dtype=torch.float32),
    Kind(8, group=64, has_minimums=True, scale_dtype=torch.float32),
]


def random_matrix(kind: Kind, num_rows: int, num_columns: int, seed: int = 0) -> AffineMatrix:
    """Weights of about unit size. Two levels need whole super blocks."""
    generator = torch.Generator().manual_seed(seed)
    group = kind.group or num_columns
    num_groups = -(-num_columns // group)

    def scales(low: float, high: float) -> GroupScales:
        shape = (num_rows, num_groups)
        if kind.has_two_levels:
            values = torch.randint(1, 64, shape, dtype=torch.int8, generator=generator)
            supers = torch.rand((num_rows, num_columns // 256), generator=generator) / 32 * high
            return GroupScales(values, (supers + low / 64).half())
        return GroupScales((torch.rand(shape, generator=generator) * (high - low) + low).to(kind.scale_dtype))

    codes = torch.randint(0, 1 << kind.bits, (num_rows, num_columns), dtype=torch.uint8, generator=generator)
    if kind.bits == 8:
        codes = codes.view(torch.int8)
    step = 2.0 / (1 << kind.bits)
    minimums = scales(-1.0, -0.5) if kind.has_minimums else None
    return AffineMatrix(codes, kind.bits, group, scales(0.5 * step, step), minimums)
