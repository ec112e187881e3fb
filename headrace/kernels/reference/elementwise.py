"""add, cast and soft_cap in plain torch."""

from __future__ import annotations

import torch


def add(x: torch.Tensor, residual: torch.Tensor) -> None:
    """residual += x, both [T, E]."""
    residual.add_(x)


def cast(x: torch.Tensor, out: torch.Tensor) -> None:
    """out = x in the dtype of ``out``; same shapes."""
    out.copy_(x)


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x = cap * tanh(x / cap), in place."""
    x.div_(cap).tanh_().mul_(cap)
