"""RankWatch: tells from the ranks' statuses whether one of them hangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.parallel.rank_status import Activity, RankStatus

BUSY_SHARE = 0.2
"""A rank whose main thread uses less of a CPU than this is not computing."""
BUSY_PATIENCE = 10
"""A rank that does compute gets so many times the timeout: kernels that compile, or one very long op."""
ABSENCE_S = 2.0
"""A watcher that has looked away for longer than this was itself stopped, most likely with the whole machine."""


@dataclass(frozen=True, slots=True)
class HungRank:
    """The verdict.

    why: continues "rank 1 …".
    """

    rank: int
    why: str


@dataclass(slots=True)
class _Seen:
    """When a rank last got on, and when it last showed a sign of life."""

    num_ticks: int = -1
    since_s: float = 0.0
    busy_ms: int = 0
    num_beats: int = -1
    beat_s: float = 0.0


class PresentClock:
    """Time less that in which its watcher did not run: it counts for nobody, for the ranks may not have run either."""

    def __init__(self) -> None:
        self._looked_s: float | None = None
        self._absent_s = 0.0

    def present(self, now_s: float) -> float:
        """What a clock shows that stood still with the watcher, at the monotonic time ``now_s``."""
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if passed_s > ABSENCE_S:
            self._absent_s += passed_s
        return now_s - self._absent_s


class RankWatch:
    """Remembers when each rank last got on.

    A rank whose process does not run is at fault before all others. One that waits for others is not, as long as one
    of them is behind; if all wait, the one that has got least far is.

    Args:
        ranks: their numbers.
        timeout_s: a standstill that counts as a hang.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self._ranks = list(ranks)
        self._timeout_s = timeout_s
        self._seen = {rank: _Seen() for rank in ranks}
        self._was_idle = True
        self._clock = PresentClock()

    def look(
        self, statuses: Sequence[RankStatus], last_step: int, has_work: bool, now_s: float
    ) -> HungRank | None:
        """Call twice a second or so.

        Args:
            statuses: of the ranks, in order.
            last_step: the newest step that the ranks were told to run.
            has_work: whether results are awaited.
            now_s: monotonic time.
        """
        now_s = self._clock.present(now_s)
        stuck: dict[int, float] = {}
        for rank, status in zip(self._ranks, statuses, strict=True):
            seen = self._seen[rank]
            if status.num_beats != seen.num_beats or self._was_idle:
                seen.num_beats, seen.beat_s = status.num_beats, now_s
            if status.num_ticks != seen.num_ticks or self._was_idle:
                seen.num_ticks, seen.since_s, seen.busy_ms = status.num_ticks, now_s, status.busy_ms
            elif now_s - seen.since_s > self._limit_s(status, seen, now_s):
                stuck[rank] = now_s - seen.since_s
        self._was_idle = not has_work
        for rank, seen in self._seen.items():
            if now_s - seen.beat_s > self._timeout_s:
                return HungRank(rank, f"has shown no sign of life for {now_s - seen.beat_s:.0f} s")
        return self._judge(dict(zip(self._ranks, statuses, strict=True)), stuck, last_step) if stuck else None

    def _limit_s(self, status: RankStatus, seen: _Seen, now_s: float) -> float:
        is_busy = status.busy_ms - seen.busy_ms > BUSY_SHARE * 1e3 * (now_s - seen.since_s)
        return self._timeout_s * (BUSY_PATIENCE if is_busy else 1)

    def _judge(
        self, statuses: dict[int, RankStatus], stuck: dict[int, float], last_step: int
    ) -> HungRank | None:
        unfinished = [rank for rank in self._ranks if statuses[rank].step_ended < last_step]
        for rank in unfinished:
            if rank in stuck and statuses[rank].activity is not Activity.WAITS:
                return HungRank(rank, f"has got nowhere for {stuck[rank]:.0f} s")
        if unfinished and all(rank in stuck for rank in unfinished):
            rank = min(unfinished, key=lambda each: statuses[each].num_ticks)
            return HungRank(rank, f"waits for other ranks, and they for it, for {stuck[rank]:.0f} s")
        if not unfinished and len(stuck) == len(self._ranks):
            rank = self._ranks[-1]
            return HungRank(rank, f"and the others have waited for their devices for {stuck[rank]:.0f} s")
        return None
