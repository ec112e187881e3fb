"""RMSNorm with a learned weight."""

from __future__ import annotations

from torch import Tensor

from headrace.layers.context import LayerContext

NORMED = "normed"


class RMSNorm:
    """Normalises rows to another buffer.

    Args:
        ctx: what layers are built from.
        name: the module of the checkpoint.
        width: columns.
        eps: added to the mean square.
        out: name of the buffer that outputs go to.
    """

    def __init__(self, ctx: LayerContext, name: str, width: int, eps: float, out: str = NORMED) -> None:
        self._ops = ctx.ops
        self._weight = load_norm_weight(ctx, name, width)
        self._eps = eps
        self._out = ctx.buffer(out, width)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]"""
        out = self._out.rows
        self._ops.rms_norm(x, self._weight, self._eps, out)
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x [T, width] to the residual stream, in place, and normalises that."""
        out = self._out.rows
        self._ops.add_rms_norm(x, residual, self._weight, self._eps, out)
        return out


def load_norm_weight(ctx: LayerContext, name: str, width: int) -> Tensor:
    """The weight [width] of the norm called ``name``; fp32, the type that norms are computed in."""
    import torch

    return ctx.weights.get(f"{name}.weight", shape=(width,)).dequantize(torch.float32, ctx.device)
