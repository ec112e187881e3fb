"""soft_cap in plain torch."""

from __future__ import annotations

import torch


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x = cap * tanh(x / cap), in place."""
    x.div_(cap).tanh_().mul_(cap)
