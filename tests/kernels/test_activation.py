"""gated_act against float64."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.kernels.reference.activation import GatedActKind, gated_act


def exact(gate: torch.Tensor, kind: GatedActKind) -> torch.Tensor:
    if kind == "silu":
        return gate / (1 + torch.exp(-gate))
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_gated_act(dtype: torch.dtype, kind: GatedActKind, num_rows: int) -> None:
    gate_up = (torch.randn(num_rows, 2 * 40, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    before, out = gate_up.clone(), torch.full((num_rows, 40), torch.nan, dtype=dtype)
    gated_act(gate_up, kind, out)
    gate, up = gate_up.double().split(40, dim=1)
    error = (out.double() - exact(gate, kind) * up).abs()
    # Of gate * up, not of the result: for negative gates 1 + tanh cancels.
    assert (error <= torch.finfo(dtype).eps * (gate * up).abs() + 1e-7).all()
    assert torch.equal(gate_up, before)
