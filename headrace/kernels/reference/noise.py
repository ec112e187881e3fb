"""The noise of a whole vocabulary from one key a row: exponentially distributed numbers, one for each token.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN_RATIO = 0x9E3779B9
_LOW_HALF = (1 << 32) - 1
STEP = _GOLDEN_RATIO - (1 << 32)
MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def exponentials(key: Tensor, num_tokens: int) -> Tensor:
    """[R, V] float32 > 0, independent and exponentially distributed with mean 1: a function of (key, token) alone.

    A token's 32 bits are its number, spread by the golden ratio from the key's low half, through the mixer "lowbias32"
    (Wellons, 2018) with the key's high half put in between. The logarithm is taken where the numbers near 0, which
    decide for unlikely tokens, keep their full resolution (2**-32).

    Args:
        key: [R] int64, all 64 bits used (``headrace.runtime.noise``).
        num_tokens: V.
    """
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    x = torch.arange(num_tokens, dtype=torch.int32, device=key.device).mul_(STEP) + low[:, None]
    shifted = torch.empty_like(x)
    _xor_shift(x, 16, shifted).mul_(MULTIPLIERS[0]).bitwise_xor_(high[:, None])
    _xor_shift(x, 15, shifted).mul_(MULTIPLIERS[1])
    _xor_shift(x, 16, shifted)
    uniform = x.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=LARGEST_BELOW_ONE).neg_().log1p_().neg_()


def keys_from(key: Tensor, first_token: int | Tensor) -> Tensor:
    """[R] int64: keys with which token 0 has the noise that ``first_token`` (one, or [R] int64) has with ``key``."""
    return (key + first_token * _GOLDEN_RATIO) & _LOW_HALF | key & ~_LOW_HALF


def _xor_shift(x: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """``x ^= x >> bits``, the shift being that of unsigned numbers."""
    torch.bitwise_right_shift(x, bits, out=scratch).bitwise_and_((1 << (32 - bits)) - 1)
    return x.bitwise_xor_(scratch)
