"""Going round a ring in shared memory that some warps fill and others empty."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def next_slot(slot, phase, NUM_SLOTS: gl.constexpr):
    """And the parity of its barriers, which changes from round to round."""
    is_last = slot == NUM_SLOTS - 1
    return gl.where(is_last, 0, slot + 1), gl.where(is_last, phase ^ 1, phase)
