"""The stateless noise on the device: a number a token from a key of ``headrace.runtime.noise``.

Integers are bit for bit those of the reference; logarithms may differ in the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exponential_of(key, token):
    """Exponentially distributed float32 > 0 of int32 tokens, by a scalar int64 key. Wellons' "lowbias32" mixes."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    x = token.to(tl.uint32) * tl.full([1], 0x9E3779B9, tl.uint32) + low
    x = (x ^ (x >> 16)) * tl.full([1], 0x7FEB352D, tl.uint32)
    x = x ^ high
    x = (x ^ (x >> 15)) * tl.full([1], 0x846CA68B, tl.uint32)
    x = x ^ (x >> 16)
    uniform = ((x >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # -log(1 - u) would lose all digits of small u
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    return tl.where(uniform < 0.01, series, -tl.log(1.0 - uniform))
