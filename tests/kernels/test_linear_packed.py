"""linear_packed and embedding_packed of the reference against float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference import linear_packed as reference
from tests.kernels.affine_matrices import KINDS, Kind, random_matrix


def exact(x: torch.Tensor, kind: Kind, bias: torch.Tensor | None) -> torch.Tensor:
    weights = random_matrix(kind, 21, 256).dequantize().double()
    return x.double() @ weights.T + (0.0 if bias is None else bias.double())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_linear_packed(kind: Kind, dtype: torch.dtype, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 256, generator=generator).to(dtype)
    bias = torch.randn(21, generator=generator) if has_bias else None
    out = torch.full((5, 30), 7.0)
    reference.linear_packed(x, random_matrix(kind, 21, 256), bias, out, 4)
    torch.testing.assert_close(out[:, 4:25].double(), exact(x, kind, bias), rtol=1e-5, atol=1e-4)
    assert (out[:, :4] == 7.0).all() and (out[:, 25:] == 7.0).all()


def test_inputs_are_rounded_to_127ths_of_the_largest_of_32() -> None:
    x = torch.zeros(1, 70)
    x[0, 1], x[0, 2] = 127.0, 3.4
    x[0, 40] = -1e-3
    x[0, 65] = 2.0
    rounded = reference.round_inputs(x)
    assert rounded[0, 1] == 127.0 and rounded[0, 2] == 3.0 and rounded[0, 3] == 0.0
    assert rounded[0, 40] == x[0, 40] and rounded[0, 65] == 2.0


def test_int8_inputs_are_rounded_inputs() -> None:
    x, matrix = (
        torch.randn(6, 256, generator=torch.Generator().manual_seed(2)),
        random_matrix(KINDS[1], 9, 256),
    )
    with_int8, with_rounded = torch.empty(6, 9), torch.empty(6, 9)
    reference.linear_packed(x, matrix, None, with_int8, 0, 8)
    reference.linear_packed(reference.round_inputs(x), matrix, None, with_rounded)
    assert torch.equal(with_int8, with_rounded)
    exactly = x.double() @ matrix.dequantize().double().T
    assert 1e-4 < (with_int8 - exactly).norm() / exactly.norm() < 1e-2


def test_int16_inputs_are_all_but_exact() -> None:
    x = torch.randn(5, 100, generator=torch.Generator().manual_seed(3)) * 7
    rounded = reference.round_inputs(x, 16)
    largest = (
        torch.nn.functional.pad(x.abs(), (0, 28))
        .unflatten(1, (4, 32))
        .amax(-1)
        .repeat_interleave(32, 1)[:, :100]
    )
    assert ((rounded - x).abs() <= largest * (0.51 / 32258)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first_row", [None, 4])
def test_embedding_packed(first_row: int | None, dtype: torch.dtype) -> None:
    matrix = random_matrix(KINDS[4], 8, 64)
    ids = torch.tensor([4, 11, 7, 7]) if first_row else torch.tensor([0, 7, 3, 3])
    if first_row:
        ids[0], ids[1] = 3, 12  # of other ranks
    out = torch.full((4, 64), torch.nan, dtype=dtype)
    reference.embedding_packed(ids, matrix, out, 1.5, first_row)
    table = matrix.dequantize().to(dtype)
    expected = table[(ids - (first_row or 0)).clamp(0, 7)] * torch.tensor(1.5, dtype=dtype)
    if first_row:
        expected[:2] = 0.0
    assert torch.equal(out, expected)
