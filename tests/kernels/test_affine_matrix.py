"""AffineMatrix: what its parts mean, and taking it apart and together."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.affine_matrix import AffineMatrix, GroupScales
from tests.kernels.affine_matrices import KINDS, Kind, random_matrix


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_dequantize_is_the_defining_formula(kind: Kind) -> None:
    matrix = random_matrix(kind, 5, 256)
    weights = matrix.dequantize()
    for row, column in [(0, 0), (1, 31), (2, 32), (3, 130), (4, 255)]:
        group = column // matrix.group_columns
        scale, minimum = matrix.scales.widen()[row, group], 0.0
        code = int(matrix.codes[row, column])
        if matrix.minimums is not None:
            minimum = matrix.minimums.widen()[row, group]
        elif kind.bits < 8:
            code -= 1 << (kind.bits - 1)
        assert weights[row, column] == scale * code + minimum


def test_two_levels_multiply() -> None:
    scales = GroupScales(
        torch.tensor([[1, 2, 3, 4]], dtype=torch.int8), torch.tensor([[0.5, 2.0]], dtype=torch.float16)
    )
    assert scales.widen().tolist() == [[0.5, 1.0, 6.0, 8.0]]


def test_a_group_may_be_cut_at_the_end() -> None:
    scales = GroupScales(torch.tensor([[1.0, 10.0]]))
    matrix = AffineMatrix(torch.ones(1, 5, dtype=torch.int8), 8, 3, scales)
    assert matrix.dequantize().tolist() == [[1.0, 1.0, 1.0, 10.0, 10.0]]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_stacked_and_taken_apart(kind: Kind) -> None:
    parts = [random_matrix(kind, rows, 256, seed=rows) for rows in (3, 4)]
    whole = AffineMatrix.stack(parts)
    dense = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(whole.dequantize(), dense)
    assert torch.equal(whole.rows(2, 6).dequantize(), dense[2:6])
    index = torch.tensor([6, 0, 0])
    assert torch.equal(whole.take_rows(index).dequantize(), dense[index])
    assert whole.num_bytes == sum(part.num_bytes for part in parts)


def test_scales_of_different_types_are_widened() -> None:
    narrow, wide = (random_matrix(Kind(4, scale_dtype=t), 2, 64) for t in (torch.float16, torch.float32))
    whole = AffineMatrix.stack([narrow, wide])
    assert whole.scales.values.dtype == torch.float32
    assert torch.equal(whole.dequantize(), torch.cat((narrow.dequantize(), wide.dequantize())))
