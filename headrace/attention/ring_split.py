"""RingSplitRule: how decodes over 8-bit caches are cut for the kernel with a ring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.attention.tiles import Ints
from headrace.attention.triton_work_list import SplitRule
from headrace.kernels.triton.attention_ring_tiles import ring_wave

_LEAST_FILL = 0.6
"""A program alone takes this part of the time that it takes for a key among as many as run at a time: less of them are
bound by latency, more by bandwidth (48 and 77 ns with one warp)."""


@dataclass(frozen=True, slots=True)
class RingSplitRule(SplitRule):
    """Short tiles fill whole waves of the launch that their number gets: a second wave with little in it takes as long
    as 0.6 of a full one. Where contexts differ, short ones fill it up (``place_of``)."""

    unit_tokens: int = 50
    merge_tokens: int = 50

    def short_cut(self, spans: Ints) -> int:
        if len(spans) == 0:
            return self.min_short_tokens
        shifts = np.arange(self.num_short_cuts) + (self.min_short_tokens.bit_length() - 1)
        units = spans + ((1 << shifts) - 1)[:, None] >> shifts[:, None]
        num_units = units.sum(axis=1)
        merged = num_units - (units == 1).sum(axis=1)
        share = self.num_kv_heads / ring_wave(len(spans) * self.num_kv_heads)
        read = (spans.sum() + self.unit_tokens * num_units + self.merge_tokens * merged) * share
        longest = np.minimum(1 << shifts, spans.max())
        waves = spans.sum() * share / longest
        evenness = np.where(waves < 1, 1.0, spans.min() / spans.max())
        last = np.maximum(_LEAST_FILL - (waves - np.ceil(waves) + 1), 0.0) * longest * evenness
        return int(1 << shifts[np.argmin(read + last)])
