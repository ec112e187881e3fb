"""Rotary tables: cosines and sines by position, for every way of stretching the context.

Angles are computed in fp32, as position times frequency: what models were trained with and what other
implementations do. At position 100,000 a float64 angle would differ from theirs by a visible 0.01.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.checkpoint.model_config import RopeScaling
from headrace.errors import ConfigError
from headrace.layers.context import LayerContext
from headrace.loader.base import WeightSource


def rotary_table(ctx: LayerContext, theta: float, head_dim: int, scaling: RopeScaling) -> Tensor:
    """Cosines of the D/2 angles, then sines: [P, D] fp32 on the model's device.

    Args:
        ctx: where to put it, how many positions to cover, and the weights, for files that bring their own divisors.
        theta: base of the frequencies.
        head_dim: D.
        scaling: how they are stretched.

    Raises:
        ConfigError: no memory for so many positions.
    """
    assert ctx.max_model_len is not None, "the model fills it in"
    frequencies, factor = rotary_frequencies(head_dim, theta, scaling, ctx.weights)
    num_bytes = ctx.max_model_len * head_dim * 4
    try:
        # Three tables' worth is in use at the peak. Linux promises memory that it has not, so that asking for the
        # whole, without touching it, is what can still be refused.
        torch.empty(3 * num_bytes, dtype=torch.uint8, device="cpu")
        angles = torch.outer(torch.arange(ctx.max_model_len, dtype=torch.float32, device="cpu"), frequencies)
        return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(factor).to(ctx.device)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"no memory for rotary tables of {num_bytes} bytes ({ctx.max_model_len} positions); lower max_model_len"
        ) from error


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling, weights: WeightSource
) -> tuple[Tensor, float]:
    """(radians per token [D/2] fp32, multiplier of cosines and sines)."""
    plain = plain_frequencies(head_dim, theta)
    if scaling.factors_tensor is not None:
        divisors = weights.get(scaling.factors_tensor, shape=(head_dim // 2,)).dequantize(torch.float32)
        return plain / divisors, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn_frequencies(plain, theta, scaling), _yarn_attention_factor(scaling)
    return plain, 1.0


def plain_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i/D) for i < D/2, fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / (theta**exponents)


def _llama3_frequencies(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are slowed by the factor, short ones not at all, with a ramp between (Llama 3.1)."""
    trained, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    assert trained is not None and low is not None and high is not None
    rotations = trained * plain / (2 * math.pi)
    share_kept = ((rotations - low) / (high - low)).clamp_(0.0, 1.0)
    return (1 - share_kept) * plain / scaling.factor + share_kept * plain


def _yarn_frequencies(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN (Peng et al. 2023): the ramp runs over dimensions, between those that turn beta_fast and beta_slow times."""
    half = len(plain)
    low, high = (
        _yarn_dimension(turns, 2 * half, theta, scaling) for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    index = torch.arange(half, dtype=torch.float32, device="cpu")
    share_slowed = ((index - low) / (high - low)).clamp_(0.0, 1.0)
    return plain / scaling.factor * share_slowed + plain * (1 - share_slowed)


def _yarn_dimension(turns: float, head_dim: int, theta: float, scaling: RopeScaling) -> float:
    """The dimension that turns so many times within the trained length."""
    trained = scaling.original_max_position_embeddings
    assert trained is not None
    return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_mscale(scaling.factor, scaling.mscale) / _yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _yarn_mscale(scaling.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
