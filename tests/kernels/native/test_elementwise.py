"""Native soft_cap against the reference op."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.native.elementwise import soft_cap
from tests.kernels.native.guarded import guarded, random_rows

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 3), (2, 2500)])
def test_soft_cap(rows: int, width: int, dtype: torch.dtype, tolerance: float) -> None:
    out = guarded(rows, width, dtype)
    out.view.copy_(random_rows(rows, width, dtype) * 40)
    expected = 30 * torch.tanh(out.view.double() / 30)
    soft_cap(out.view, 30.0)
    torch.testing.assert_close(out.view.double(), expected, rtol=tolerance, atol=30 * 1e-6)
    out.check()


def test_the_far_ends() -> None:
    x = torch.tensor([[-torch.inf, -1e30, 1e30, torch.inf, torch.nan]])
    soft_cap(x, 5.0)
    assert x[0, :4].tolist() == [-5.0, -5.0, 5.0, 5.0] and x[0, 4].isnan()
