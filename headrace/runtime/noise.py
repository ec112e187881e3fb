"""Stateless noise: the 64-bit key of a token to be sampled is a hash of (sample_seed, child_index, position).

The same position of the same child gets the same key whatever the batch, the device, a preemption or a discarded step
did before; the sampler makes one number for each entry of the vocabulary from it. The hash chains the finalizer of
splitmix64 (Steele, Lea and Flood, 2014) over the three integers and a zero.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
import torch

IntArray = TypeVar("IntArray", torch.Tensor, np.ndarray)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def noise_keys(sample_seed: IntArray, child_index: IntArray, position: IntArray) -> IntArray:
    """The keys of tokens, int64; torch (any device) or numpy, whichever comes in.

    Args:
        sample_seed, child_index, position: int64, of shapes that broadcast. All 64 bits of a seed are used.
    """
    x: Any = sample_seed
    for part in (child_index, position, 0):
        x = _mix(x + (part + 1) * _signed(_GOLDEN))
    return cast(IntArray, x)


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
