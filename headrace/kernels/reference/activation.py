"""gated_act in plain torch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

GatedActKind = Literal["silu", "gelu_tanh"]


def gated_act(gate_up: torch.Tensor, kind: GatedActKind, out: torch.Tensor) -> None:
    """out = act(gate) * up, with gate the first half of each row and up the second.

    Args:
        gate_up: [T, 2I].
        kind: "silu" or "gelu_tanh".
        out: [T, I].
    """
    width = out.shape[1]
    gate, up = gate_up.narrow(1, 0, width), gate_up.narrow(1, width, width)
    if kind == "silu":
        # what F.silu calls, and which writes into ``out``, so that no memory is taken between
        torch._C._nn.silu(gate, out=out)  # type: ignore[call-arg]
        out.mul_(up)
    else:
        torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)
