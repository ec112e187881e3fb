"""Native linear_packed and embedding_packed against the reference ops."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.affine_matrix import AffineMatrix
from headrace.kernels.native import linear_packed as native_ops
from headrace.kernels.reference import linear_packed as reference
from tests.kernels.affine_matrices import KINDS, Kind, random_matrix

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


def inputs(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows in a wider buffer, beginning at an odd element; each with a size of its own."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(count, width + 5, generator=generator) * torch.rand(count, 1, generator=generator)
    return buffer.to(dtype)[:, 3 : 3 + width]


def check(
    matrix: AffineMatrix, x: torch.Tensor, out_dtype: torch.dtype, has_bias: bool, input_bits: int
) -> None:
    """Compares; the bound is relative to the largest output. Nothing beside the outputs may be written."""
    num_rows, width = len(x), matrix.num_rows
    bias = torch.randn(width, generator=torch.Generator().manual_seed(5)) if has_bias else None
    expected = torch.empty(num_rows, width)
    reference.linear_packed(x, matrix, bias, expected, 0, input_bits)
    out = torch.full((num_rows + 2, width + 7), 7.0, dtype=out_dtype)
    packed = native_ops.pack_matrix(matrix)
    native_ops.linear_packed(x, packed, bias, out[1 : num_rows + 1], 3, input_bits)
    got = out[1 : num_rows + 1, 3 : 3 + width].float()
    if num_rows:
        # the second digit of a number between two may be either; many rows may have bf16 digits (AMX)
        digits = {16: 6e-6 if num_rows < 64 else 4e-5}.get(input_bits, 0.0)
        tolerance = max(TOLERANCE[out_dtype], digits)
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()
    out[1 : num_rows + 1, 3 : 3 + width] = 7.0
    assert (out == 7.0).all()


@pytest.mark.parametrize("input_bits", [32, 16, 8])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 7, 9, 35, 65, 300])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows(kind: Kind, num_rows: int, input_bits: int) -> None:
    check(
        random_matrix(kind, 37, 512),
        inputs(num_rows, 512, torch.float32),
        torch.float32,
        True,
        input_bits,
    )


@pytest.mark.parametrize("input_bits", [32, 16, 8])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("out_dtype", TOLERANCE)
def test_types(dtype: torch.dtype, out_dtype: torch.dtype, input_bits: int) -> None:
    check(random_matrix(KINDS[1], 20, 96), inputs(6, 96, dtype), out_dtype, False, input_bits)


@pytest.mark.parametrize("input_bits", [32, 16, 8])
@pytest.mark.parametrize("shape", [(1, 32), (8, 64), (9, 100), (3, 12), (200, 33)])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4], Kind(8, group=None)], ids=str)
def test_widths_that_are_no_whole_tiles(kind: Kind, shape: tuple[int, int], input_bits: int) -> None:
    if kind.group is not None and shape[1] < kind.group:
        kind = Kind(kind.bits, group=None)
    check(random_matrix(kind, *shape), inputs(5, shape[1], torch.float32), torch.float32, True, input_bits)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_extremes_do_not_overflow(kind: Kind) -> None:
    """All codes and inputs at the ends of their ranges, with one sign and with signs that agree."""
    matrix = random_matrix(kind, 8, 512)
    ends = (-128, 127) if kind.bits == 8 else (0, (1 << kind.bits) - 1)
    for end in ends:
        matrix.codes.fill_(end)
        for value in (1.0, -1.0):
            for num_rows, input_bits in ((3, 8), (3, 16), (17, 16), (64, 16)):
                check(matrix, torch.full((num_rows, 512), value), torch.float32, False, input_bits)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("input_bits", [32, 16, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 20, 70])
def test_a_number_that_is_none_is_seen_in_its_row_alone(num_rows: int, input_bits: int, value: float) -> None:
    for kind in KINDS:
        packed = native_ops.pack_matrix(random_matrix(kind, 24, 512))
        x, clean, out = (
            inputs(num_rows, 512, torch.float32),
            torch.empty(num_rows, 24),
            torch.empty(num_rows, 24),
        )
        native_ops.linear_packed(x, packed, None, clean, 0, input_bits)
        x[num_rows - 1, 77] = value
        native_ops.linear_packed(x, packed, None, out, 0, input_bits)
        assert not out[-1].isfinite().any()
        assert torch.equal(out[:-1], clean[:-1])


@pytest.mark.parametrize("input_bits", [16, 8])
def test_a_rows_result_does_not_depend_on_the_others(input_bits: int) -> None:
    """Whatever kernel takes them, as long as inputs are whole numbers."""
    for kind in KINDS:
        packed = native_ops.pack_matrix(random_matrix(kind, 24, 512))
        x = inputs(60, 512, torch.float32)
        together, alone = torch.empty(60, 24), torch.empty(1, 24)
        native_ops.linear_packed(x, packed, None, together, 0, input_bits)
        for row in (0, 3, 56, 59):
            native_ops.linear_packed(x[row : row + 1], packed, None, alone, 0, input_bits)
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("input_bits", [16, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_output_does_not_depend_on_the_others(kind: Kind, num_rows: int, input_bits: int) -> None:
    """Tiles of a matrix multiplied side by side and alone give the same bits."""
    matrix = random_matrix(kind, 24, 512)
    x, together, alone = (
        inputs(num_rows, 512, torch.float32),
        torch.empty(num_rows, 24),
        torch.empty(num_rows, 8),
    )
    native_ops.linear_packed(x, native_ops.pack_matrix(matrix), None, together, 0, input_bits)
    for first in (0, 8, 16):
        tile = native_ops.pack_matrix(matrix.rows(first, first + 8))
        native_ops.linear_packed(x, tile, None, alone, 0, input_bits)
        assert torch.equal(alone, together[:, first : first + 8])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_many_rows_are_as_exact_as_few(kind: Kind) -> None:
    matrix = random_matrix(kind, 37, 512)
    x, exact, out = inputs(300, 512, torch.float32), torch.empty(300, 37), torch.empty(300, 37)
    reference.linear_packed(x, matrix, None, exact, 0, 32)
    native_ops.linear_packed(x, native_ops.pack_matrix(matrix), None, out, 0, 16)
    assert (out - exact).abs().max() <= 5e-5 * exact.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_embedding(kind: Kind, dtype: torch.dtype) -> None:
    matrix = random_matrix(kind, 19, 512)
    packed = native_ops.pack_matrix(matrix)
    ids = torch.tensor([2, 20, 7, 7, 0, 21])
    for scale, first_row in ((1.0, None), (1.7, 2)):
        rows = ids.clamp(0, 18) if first_row is None else ids
        expected = torch.empty(6, 512, dtype=dtype)
        reference.embedding_packed(rows, matrix, expected, scale, first_row)
        out = torch.full((8, 512), 7.0, dtype=dtype)
        native_ops.embedding_packed(rows, packed, out[1:7], scale, first_row)
        assert torch.equal(out[1:7], expected)
        assert (out[0] == 7.0).all() and (out[7] == 7.0).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_matrices_are_no_larger_than_their_bits(kind: Kind) -> None:
    packed = native_ops.pack_matrix(random_matrix(kind, 64, 512))
    group = kind.group or 512
    scale_bits = 8 + 16 * group / 256 if kind.has_two_levels else 8 * kind.scale_dtype.itemsize
    per_weight = kind.bits + scale_bits * (1 + kind.has_minimums) / group
    assert packed.num_bytes == 64 * 512 * per_weight / 8
