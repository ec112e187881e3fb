"""TokenMask: which tokens the constrained requests of a step may sample. It goes down beside the seam's delta."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TokenMask(NamedTuple):
    """Masks of some of the requests that sample in a step; the others may sample any token.

    rows: [N] int64, rising, indices into ``SchedulerOutput.sampled``.
    words: [N, ceil(V / 32)] uint32, contiguous; bit i of word w allows token 32 * w + i. Tokens past the last word are
        forbidden.
    """

    rows: np.ndarray
    words: np.ndarray
