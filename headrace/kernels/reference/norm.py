"""rms_norm and add_rms_norm in plain torch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (Zhang and Sennrich's RMSNorm).

    Args:
        x, out: [T, E], any float type; may be the same tensor.
        weight: [E], any float type.
    """
    wide = x if x.dtype == torch.float32 else x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    if out.dtype == torch.float32:
        torch.mul(wide, scale, out=out).mul_(weight)
    else:
        out.copy_(wide.mul(scale).mul_(weight))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """residual += x; out = rms_norm(residual).

    Args:
        x, residual, out: [T, E]; ``out`` may be ``x``.
        weight: [E].
    """
    residual.add_(x)
    rms_norm(residual, weight, eps, out)
