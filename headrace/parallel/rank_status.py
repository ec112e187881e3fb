"""RankStatus: what one rank is doing, for whoever watches it. A few numbers in shared memory, cheap to change."""

from __future__ import annotations

from array import array
from enum import IntEnum


class Activity(IntEnum):
    """What a rank does now."""

    IDLE = 0
    COMPUTES = 1
    WAITS = 2
    """For other ranks or for its device."""


_STEP_BEGUN, _STEP_ENDED, _ACTIVITY, _TICKS, _BUSY_MS, _BEATS = range(6)


class RankStatus:
    """Written by the rank, read by the watcher; each number by itself is whole.

    Args:
        cells: 8 int64; memory of its own when left out.
    """

    def __init__(self, cells: memoryview | None = None) -> None:
        self._cells = memoryview(array("q", [0] * 8)) if cells is None else cells

    def begin_step(self, step_id: int) -> None:
        """The rank starts to compute a step."""
        self._cells[_STEP_BEGUN] = step_id
        self._note(Activity.COMPUTES)

    def end_step(self) -> None:
        """It has done, or queued on its device, all of the step that it began."""
        self._cells[_STEP_ENDED] = self._cells[_STEP_BEGUN]
        self._note(Activity.IDLE)

    def enter_wait(self) -> None:
        """It waits for others."""
        self._note(Activity.WAITS)

    def leave_wait(self) -> None:
        """It computes on."""
        self._note(Activity.COMPUTES)

    def beat(self, busy_ms: int) -> None:
        """Its process runs; ``busy_ms`` is the CPU time that its main thread has used since the start."""
        self._cells[_BUSY_MS] = busy_ms
        self._cells[_BEATS] += 1

    def _note(self, activity: Activity) -> None:
        cells = self._cells
        cells[_ACTIVITY] = activity
        cells[_TICKS] += 1

    @property
    def step_begun(self) -> int:
        """The last step that it began."""
        return self._cells[_STEP_BEGUN]

    @property
    def step_ended(self) -> int:
        """The last step that it ended."""
        return self._cells[_STEP_ENDED]

    @property
    def activity(self) -> Activity:
        """What it does now."""
        return Activity(self._cells[_ACTIVITY])

    @property
    def num_ticks(self) -> int:
        """Rises with every step and collective: how far it has got."""
        return self._cells[_TICKS]

    @property
    def num_beats(self) -> int:
        """Rises every half second while its process runs."""
        return self._cells[_BEATS]

    @property
    def busy_ms(self) -> int:
        """CPU time of its main thread: what tells a long computation from a standstill."""
        return self._cells[_BUSY_MS]

    def numbers(self) -> list[int]:
        """All of it, to be sent to a watcher on another host."""
        return self._cells.tolist()

    def take(self, numbers: list[int]) -> None:
        """Become what ``numbers`` of a rank on another host say."""
        for place, number in enumerate(numbers):
            self._cells[place] = number
