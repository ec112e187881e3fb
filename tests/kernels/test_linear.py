"""linear against float64, over all the ways that it takes."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference.linear import linear

ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def inputs(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 40, generator=generator)
    weight = torch.randn(24, 40, generator=generator) * 40**-0.5
    return x.to(dtype), weight.to(dtype), torch.randn(24, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 8, 13, 128, 129])
def test_linear(num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = inputs(num_rows, dtype)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    out = torch.full((num_rows, 24), torch.nan, dtype=dtype)
    linear(x, weight, bias if has_bias else None, out)
    assert ((out.double() - exact).abs() <= ERROR[dtype] * (1 + exact.abs())).all()


@pytest.mark.parametrize("num_rows", [1, 6, 200])
def test_other_columns_are_left_alone(num_rows: int) -> None:
    x, weight, bias = inputs(num_rows, torch.float32)
    out, alone = torch.full((num_rows, 30), 7.0), torch.empty(num_rows, 24)
    linear(x, weight, bias, alone)
    linear(x, weight, bias, out, 4)
    torch.testing.assert_close(out[:, 4:28], alone, rtol=1e-6, atol=1e-6)
    assert (out[:, :4] == 7.0).all() and (out[:, 28:] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_outputs_may_be_fp32(num_rows: int, dtype: torch.dtype) -> None:
    x, weight, _ = inputs(num_rows, dtype)
    out = torch.empty(num_rows, 24)
    linear(x, weight, None, out)
    exact = x.double() @ weight.double().T
    assert ((out.double() - exact).abs() <= ERROR[dtype] * (1 + exact.abs())).all()
