"""RMSNorm with a learned weight."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.layers.context import LayerContext


class RMSNorm:
    """Normalises rows.

    Args:
        ctx: what layers are built from.
        name: the module of the checkpoint.
        width: columns.
        eps: added to the mean square.
    """

    def __init__(self, ctx: LayerContext, name: str, width: int, eps: float) -> None:
        self._ops = ctx.ops
        self._weight = load_norm_weight(ctx, name, width)
        self._eps = eps

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x, out: [T, width]; may be the same."""
        self._ops.rms_norm(x, self._weight, self._eps, out)

    def add(self, x: Tensor, residual: Tensor, out: Tensor) -> None:
        """Adds x to the residual stream, in place, and normalises that; all [T, width], ``out`` may be ``x``."""
        self._ops.add_rms_norm(x, residual, self._weight, self._eps, out)


def load_norm_weight(ctx: LayerContext, name: str, width: int) -> Tensor:
    """The weight [width] of the norm called ``name``; fp32, the type that norms are computed in."""
    return ctx.weights.get(f"{name}.weight", shape=(width,)).dequantize(torch.float32, ctx.device)
