"""Triton soft_cap against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.elementwise import soft_cap
from tests.kernels.triton_setup import DEVICE, relative_error

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # numpy, of the interpreter


def check(rows: int, width: int) -> None:
    x = torch.randn(rows, width, generator=torch.Generator(device=DEVICE).manual_seed(1), device=DEVICE) * 40
    exact = 30.0 * torch.tanh(x.double() / 30.0)
    soft_cap(x, 30.0)
    assert relative_error(x, exact) < 2e-6


def test_soft_cap() -> None:
    check(3, 100)
    check(0, 4)
    x = torch.tensor([[torch.inf, -torch.inf, 1e30]], device=DEVICE)
    soft_cap(x, 5.0)
    assert x.tolist() == [[5.0, -5.0, 5.0]]


@pytest.mark.gpu
def test_large() -> None:
    check(64, 256000)
