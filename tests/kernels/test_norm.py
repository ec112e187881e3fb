"""rms_norm and add_rms_norm against float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference.norm import add_rms_norm, inverse_rms, rms_norm

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative error: fp32's own sums, else one rounding."""


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def inputs(num_rows: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = (torch.randn(num_rows, 72, generator=generator) * scale).to(dtype)
    return x, torch.rand(72, generator=generator) + 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_rms_norm(dtype: torch.dtype, num_rows: int, scale: float) -> None:
    x, weight = inputs(num_rows, dtype, scale)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, weight, 1e-5, out)
    torch.testing.assert_close(out.double(), exact(x, weight, 1e-5), rtol=DTYPES[dtype], atol=1e-7)


def test_zeros_stay_zeros_and_eps_counts() -> None:
    x = torch.zeros(2, 8)
    rms_norm(x, torch.ones(8), 1e-6, x)
    assert torch.equal(x, torch.zeros(2, 8))
    assert torch.allclose(inverse_rms(torch.zeros(1, 8), 0.25), torch.tensor([[2.0]]))
    assert torch.allclose(inverse_rms(torch.full((1, 8), 3.0), 16.0), torch.tensor([[0.2]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_the_residual_and_may_write_over_x(dtype: torch.dtype) -> None:
    x, weight = inputs(4, dtype)
    residual = inputs(4, dtype, 2.0)[0].flip(0)
    total = residual + x
    out = torch.empty_like(x)
    first = residual.clone()
    add_rms_norm(x, first, weight, 1e-5, out)
    assert torch.equal(first, total)
    torch.testing.assert_close(out.double(), exact(total, weight, 1e-5), rtol=DTYPES[dtype], atol=1e-7)
    add_rms_norm(x, residual, weight, 1e-5, x)
    assert torch.equal(x, out)
