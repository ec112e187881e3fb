"""Triton linear against float64, over all the ways that it takes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.linear import linear
from tests.kernels.triton_setup import DEVICE, HALF, max_error, relative_error


def check(
    rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    out_type: torch.dtype | None = None,
    col: int = 0,
) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    x = torch.randn(rows, num_inputs, generator=generator, device=DEVICE).to(dtype)
    weight = torch.randn(num_outputs, num_inputs, generator=generator, device=DEVICE).to(dtype)
    bias = torch.randn(num_outputs, generator=generator, device=DEVICE).to(dtype) * 8 if has_bias else None
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    out = torch.full((rows, num_outputs + 2 * col), 7.0, dtype=out_type or dtype, device=DEVICE)
    linear(x, weight, bias, out, col)
    if rows:
        got = out[:, col : col + num_outputs]
        summed = 1e-5 * max(1.0, num_inputs / 4096) ** 0.5  # of fp32 sums of that many products
        assert relative_error(got, exact) < max(max_error(out.dtype), summed * (dtype == HALF))
    assert (out[:, :col] == 7.0).all() and (out[:, col + num_outputs :] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 9])
def test_linear(rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    check(rows, 50, 96, dtype, has_bias=has_bias, col=5)


@pytest.mark.parametrize("rows", [1, 3])
def test_outputs_may_be_fp32(rows: int) -> None:
    check(rows, 20, 1600, HALF, out_type=torch.float32)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_are_not_aligned(rows: int) -> None:
    check(rows, 20, 37, HALF)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 14336), (28672, 4096), (1024, 3072), (960, 576)], ids=str
)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 64])
def test_large(rows: int, shape: tuple[int, int]) -> None:
    check(rows, *shape, torch.bfloat16, has_bias=True, col=64)
    check(rows, *shape, torch.bfloat16, out_type=torch.float32)
