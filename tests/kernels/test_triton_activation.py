"""Triton gated_act against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from headrace.kernels.triton.activation import gated_act
from tests.kernels.triton_setup import DEVICE, HALF, max_error, relative_error

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # numpy, of the interpreter


def check(rows: int, width: int, kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(width)
    gate_up = (torch.randn(rows, 2 * width, generator=generator, device=DEVICE) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    exact = (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up
    out = torch.full((rows, width), torch.nan, dtype=dtype, device=DEVICE)
    gated_act(gate_up, kind, out)
    assert relative_error(out, exact) < max_error(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_act(kind: str, dtype: torch.dtype) -> None:
    check(3, 50, kind, dtype)
    check(1, 1500, kind, dtype)
    check(0, 8, kind, dtype)


def test_extreme_gates() -> None:
    gate_up = torch.tensor([[1e4, -1e4, 0.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for kind in ("silu", "gelu_tanh"):
        out = torch.empty(1, 3, device=DEVICE)
        gated_act(gate_up, kind, out)
        assert out.tolist() == [[1e4, 0.0, 0.0]]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_large(kind: str) -> None:
    check(777, 14336, kind, torch.bfloat16)
