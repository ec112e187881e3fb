"""gated_act in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_act(gate_up: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    """out = act(gate) * up, with gate the first half of each row and up the second.

    Args:
        gate_up: [T, 2I].
        kind: "silu" or "gelu_tanh".
        out: [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "silu":
        torch.mul(F.silu(gate), up, out=out)
    else:
        assert kind == "gelu_tanh", kind
        torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)
