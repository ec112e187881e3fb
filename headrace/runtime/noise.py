"""Stateless noise: the 64-bit key of a token to be sampled is a hash of (sample_seed, child_index, position, stream).

The same position of the same child gets the same key whatever the batch, the device, a preemption or a discarded step
did before; the sampler makes one number for each entry of the vocabulary from it. The hash chains the finalizer of
splitmix64 (Steele, Lea and Flood, 2014) over the four integers.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
import torch

IntArray = TypeVar("IntArray", torch.Tensor, np.ndarray)

TOKEN_STREAM = 0
"""The stream that picks tokens. Other uses at the same position (accepting a draft, say) take other streams."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def noise_key(sample_seed: int, child_index: int, position: int, stream: int = TOKEN_STREAM) -> int:
    """The key of one token, a signed 64-bit integer, in plain Python."""
    x = sample_seed & _MASK
    for part in (child_index, position, stream):
        x = _mix_int((x + (part + 1) * _GOLDEN) & _MASK)
    return _signed(x)


def noise_keys(
    sample_seed: IntArray, child_index: IntArray, position: IntArray, stream: int = TOKEN_STREAM
) -> IntArray:
    """The same keys for many tokens, int64; torch (any device) or numpy, whichever comes in.

    Args:
        sample_seed, child_index, position: int64, of shapes that broadcast. All 64 bits of a seed are used.
    """
    x: Any = sample_seed
    for part in (child_index, position):
        x = _mix(x + (part + 1) * _signed(_GOLDEN))
    return cast(IntArray, _mix(x + _signed((stream + 1) * _GOLDEN)))


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MUL_1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL_2) & _MASK
    return x ^ (x >> 31)


def _mix(x: Any) -> Any:
    x = (x ^ _shift_right(x, 30)) * _signed(_MUL_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MUL_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Any, bits: int) -> Any:
    """Logical shift: that of signed integers copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
