"""soft_cap against float64."""

from __future__ import annotations

import torch

from headrace.kernels.reference.elementwise import soft_cap


def test_soft_cap_in_place() -> None:
    x = torch.linspace(-200, 200, 64).view(4, 16)
    exact = 30.0 * torch.tanh(x.double() / 30.0)
    soft_cap(x, 30.0)
    torch.testing.assert_close(x.double(), exact, rtol=1e-6, atol=1e-6)
    assert x.abs().max() <= 30.0
