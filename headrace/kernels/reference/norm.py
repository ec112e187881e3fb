"""rms_norm and add_rms_norm in plain torch."""

from __future__ import annotations

from functools import lru_cache

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (Zhang and Sennrich's RMSNorm).

    Args:
        x, out: [T, E], any float type; may be the same tensor.
        weight: [E] fp32.
    """
    wide = x.float()  # once: ops over two types cost more than the copy
    if wide is x:
        torch.mul(torch.mul(wide, inverse_rms(wide, eps)), weight, out=out)
    else:
        out.copy_(wide.mul_(inverse_rms(wide, eps)).mul_(weight))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """residual += x; out = rms_norm(residual).

    Args:
        x, residual, out: [T, E]; ``out`` may be ``x``.
        weight: [E] fp32.
    """
    residual.add_(x)
    rms_norm(residual, weight, eps, out)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, which stays with size 1; x is fp32."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    # One op. As Python numbers, eps and 1/E would make it three, each of them as slow as the norm itself at T = 1.
    addend = _constant(eps, None if x.is_cpu else x.device)
    return torch.addcmul(addend, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


@lru_cache(maxsize=64)
def _constant(value: float, device: torch.device | None) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)
