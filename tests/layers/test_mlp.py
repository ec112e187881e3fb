"""GatedMLP alone and over ranks, and the activations it knows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.errors import UnsupportedModelError
from headrace.layers.mlp import GatedMLP
from headrace.parallel.state import ParallelState
from tests.layers.dict_weights import DictWeights, context, random_tensors
from tests.parallel.thread_group import run_ranks

HIDDEN, INNER = 6, 8
TENSORS = random_tensors(
    {
        "m.gate_proj.weight": (INNER, HIDDEN),
        "m.up_proj.weight": (INNER, HIDDEN),
        "m.down_proj.weight": (HIDDEN, INNER),
        "m.gate_proj.bias": (INNER,),
        "m.up_proj.bias": (INNER,),
        "m.down_proj.bias": (HIDDEN,),
    }
)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_gated_mlp_in_place(act: str, size: int) -> None:
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2))
    gate, up = (
        F.linear(x, TENSORS[f"m.{part}_proj.weight"], TENSORS[f"m.{part}_proj.bias"])
        for part in ("gate", "up")
    )
    activated = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")
    expected = F.linear(activated * up, TENSORS["m.down_proj.weight"], TENSORS["m.down_proj.bias"])

    def work(parallel: ParallelState) -> torch.Tensor:
        mlp = GatedMLP(context(DictWeights(TENSORS), parallel), "m", HIDDEN, INNER, act, True)
        out = x.clone()
        mlp(out, out)
        return out

    for got in run_ranks(size, work):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_unknown_activations_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"activation 'relu' of 'm' .*\(known: silu"):
        GatedMLP(context(DictWeights(TENSORS)), "m", HIDDEN, INNER, "relu", False)
