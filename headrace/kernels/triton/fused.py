"""Ops that stand for two or three in a row, for a few tokens: each launch left out saves more than its own work.

Each gives what the ops it stands for give, roundings included, but for the order of sums.
"""

from __future__ import annotations

import torch

from headrace.kernels.triton.linear import MAX_SKINNY_ROWS, gemv, is_aligned, skinny

MAX_NORM_ROWS = 1
"""Rows for which a norm is best computed by every program that needs it."""


def can_fuse(num_rows: int, x_dtype: torch.dtype, weight: torch.Tensor) -> bool:
    """Whether the ops here take a linear of so many rows with this weight."""
    if num_rows == 0 or num_rows > MAX_SKINNY_ROWS or not is_aligned(weight, weight):
        return False
    return num_rows == 1 or x_dtype != torch.float32


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> None:
    """residual += linear(x): ``linear`` and the first half of ``add_rms_norm``. At most MAX_SKINNY_ROWS rows."""
    run = gemv if x.shape[0] == 1 else skinny
    run(x, weight, bias, residual, adds=True)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, out: torch.Tensor
) -> None:
    """out = act(gate) * up, where weight [2n, in] gives gate and up: ``linear``, ``gated_act``."""
    run = gemv if x.shape[0] == 1 else skinny
    run(x, weight, bias, out, gate=kind)


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
