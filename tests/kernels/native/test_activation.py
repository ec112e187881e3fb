"""Native gated_act against the reference op."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.native.activation import gated_act
from headrace.kernels.reference import activation as reference
from headrace.kernels.reference.activation import GatedActKind
from tests.kernels.native.guarded import guarded, random_rows

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (1, 1536), (3, 37), (40, 1030)])
def test_gated_act(rows: int, width: int, kind: GatedActKind, dtype: torch.dtype) -> None:
    gate_up = random_rows(rows, 2 * width, dtype, first=1 + width % 3)
    gate_up[:, :width] *= 4
    expected = torch.empty(rows, width)
    reference.gated_act(gate_up.float(), kind, expected)
    out = guarded(rows, width, dtype)
    gated_act(gate_up, kind, out.view)
    torch.testing.assert_close(out.view.float(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    out.check()


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_large_and_broken_numbers(kind: GatedActKind) -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, -20.0, 20.0, 90.0, 200.0, 1e30, torch.inf, torch.nan]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    out, expected = torch.empty_like(gate), torch.empty_like(gate)
    gated_act(gate_up, kind, out)
    reference.gated_act(gate_up, kind, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
