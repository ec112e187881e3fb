"""Ops that stand for two or three in a row, for one token: each launch left out saves more than its own work.

Each gives what the ops it stands for give, roundings included, but for the order of sums.
"""

from __future__ import annotations

import torch

from headrace.kernels.triton.linear import gemv, is_aligned


def can_fuse(weight: torch.Tensor) -> bool:
    """Whether the ops here take a linear with this weight."""
    return is_aligned(weight, weight)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> None:
    """residual += linear(x), one row: ``linear`` and the first half of ``add_rms_norm``."""
    gemv(x, weight, bias, residual, adds=True)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, out: torch.Tensor
) -> None:
    """out = act(gate) * up, one row, where weight [2n, in] gives gate and up: ``linear``, ``gated_act``."""
    gemv(x, weight, bias, out, gate=kind)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    col: int = 0,
) -> None:
    """out = linear(rms_norm(x)), one row: ``rms_norm``, ``linear``."""
    gemv(x, weight, bias, out, col, norm=(norm_weight, eps))


def norm_gated_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    out: torch.Tensor,
) -> None:
    """out = act(gate) * up of rms_norm(x), one row: ``rms_norm``, ``linear``, ``gated_act``."""
    gemv(x, weight, bias, out, norm=(norm_weight, eps), gate=kind)
