"""Native norms against the reference ops."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.native import norm
from headrace.kernels.reference import norm as reference
from tests.kernels.native.guarded import guarded, random_rows

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative: two roundings to the type may differ by one unit in the last place."""
pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 7, 16, 40, 576, 577])
@pytest.mark.parametrize("count", [0, 1, 33])
def test_rms_norm(count: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random_rows(count, width, dtype, first=3), torch.rand(width) + 0.5
    expected = torch.empty(count, width, dtype=dtype)
    reference.rms_norm(x, weight, 1e-5, expected)
    out = guarded(count, width, dtype)
    norm.rms_norm(x, weight, 1e-5, out.view)
    torch.testing.assert_close(out.view, expected, rtol=TOLERANCE[dtype], atol=1e-6)
    out.check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [5, 576])
@pytest.mark.parametrize("in_place", [False, True])
def test_add_rms_norm(width: int, dtype: torch.dtype, in_place: bool) -> None:
    x, residual = random_rows(9, width, dtype, 1), random_rows(9, width, dtype, 2, seed=1)
    weight = torch.rand(width) + 0.5
    expected, total = torch.empty(9, width, dtype=dtype), residual.clone()
    reference.add_rms_norm(x, total, weight, 1e-6, expected)
    out = x if in_place else torch.empty(9, width, dtype=dtype)
    norm.add_rms_norm(x, residual, weight, 1e-6, out)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_nan_and_infinity_stay() -> None:
    for dtype in TOLERANCE:
        x = torch.tensor([[1.0, float("nan"), 2.0], [float("inf"), 1.0, 2.0]]).to(dtype)
        out = torch.empty_like(x)
        norm.rms_norm(x, torch.ones(3), 1e-5, out)
        assert out[0].isnan().all() and out[1, 0].isnan() and (out[1, 1:] == 0).all()
