"""Triton norms against the reference in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.norm import add_rms_norm, rms_norm
from tests.kernels.triton_setup import DEVICE, HALF, max_error, relative_error

EPS = 1e-5


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def check(rows: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(width)
    x, residual = torch.randn(2, rows, width, generator=generator, device=DEVICE).to(dtype)
    weight = (torch.rand(width, generator=generator, device=DEVICE) + 0.5).to(weight_dtype)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, weight, EPS, out)
    assert relative_error(out, exact(x, weight)) < max_error(dtype)
    total = x + residual
    add_rms_norm(x, residual, weight, EPS, x)  # the output may be the input
    assert torch.equal(residual, total)
    assert relative_error(x, exact(total, weight)) < max_error(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("width", [40, 64, 576])
def test_norms(width: int, dtype: torch.dtype) -> None:
    check(3, width, dtype)
    check(1, width, dtype, dtype)
    check(0, width, dtype)


def test_rows_of_a_wider_buffer() -> None:
    x = torch.randn(4, 100, device=DEVICE)[:, 20:60]
    out = torch.zeros(4, 90, device=DEVICE)
    rms_norm(x, torch.ones(40, device=DEVICE), EPS, out[:, 10:50])
    assert relative_error(out[:, 10:50], exact(x, torch.ones(40, device=DEVICE))) < 2e-6
    assert not out[:, :10].any() and not out[:, 50:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [576, 1024, 4096, 8192])
def test_large(width: int, dtype: torch.dtype) -> None:
    check(1000, width, dtype)
