"""LoadTimes: how long blocks take from each tier, as measured, and when to measure again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

Place = Literal["host", "disk"]

TRUSTED_S = 30.0
"""So long a measured time is believed: a place that was slow may be fast by now, and only loads tell."""

_SMOOTHING = 0.2


class LoadTimes:
    """Milliseconds a block, by place.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._block_ms: dict[Place, float] = {}
        self._measured_at: dict[Place, float] = {}

    def expected_ms(self, places: Sequence[Place]) -> float:
        """Of a load of blocks that lie in these places; those that are not known count nothing."""
        return sum(self._block_ms.get(place, 0.0) for place in places)

    def blocks_to_measure(self, places: Sequence[Place]) -> int:
        """The fewest first blocks that would measure a place anew whose time is too old to be believed; 0: none is."""
        for index, place in enumerate(places):
            if self._is_old(place):
                return index + 1
        return 0

    def learn(self, places: Sequence[Place], elapsed_ms: float) -> None:
        """A load of these blocks took so long. What a mixed load took beyond the time of host memory is the disk's."""
        place: Place = "disk" if "disk" in places else "host"
        count = places.count(place)
        others_ms = self.expected_ms([other for other in places if other != place])
        measured = max(0.0, elapsed_ms - others_ms) / count
        known = self._block_ms.get(place, measured)
        is_over = measured < known and self._is_old(place)  # what was slow is not, and counts no more
        self._block_ms[place] = measured if is_over else known + _SMOOTHING * (measured - known)
        self._measured_at[place] = self._clock()

    def _is_old(self, place: Place) -> bool:
        measured_at = self._measured_at.get(place)
        return measured_at is not None and self._clock() - measured_at >= TRUSTED_S
