"""LoadWatch: tells from the ranks' news whether one of them hangs while all load a model, or other weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.parallel.rank_status import RankStatus
from headrace.runtime.rank_watch import HungRank, PresentClock


@dataclass(slots=True)
class _Loading:
    """How far a rank says that it has come: stages begun, and the share of the last that is done. And when its process
    was last seen to run."""

    stage: str
    num_stages: int = 0
    share: float = 0.0
    seen: tuple[int, float] = (-1, 0.0)
    since_s: float = 0.0
    num_beats: int = -1
    beat_s: float = 0.0


class LoadWatch:
    """Remembers when each rank last came further.

    Ranks that are done with a stage may wait in it for others, so only the one that is furthest behind is looked at: as
    long as it comes further, all will. A rank's news may come in on another thread than that which looks.

    Args:
        ranks: their numbers.
        timeout_s: ``rank_load_timeout_s``, a standstill that counts as a hang.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self._ranks = list(ranks)
        self._timeout_s = timeout_s
        self._clock = PresentClock()
        self._loading: dict[int, _Loading] = {}

    def begin(self, stage: str) -> None:
        """All ranks were told to load; ``stage`` is what they do until they say more."""
        self._loading = {rank: _Loading(stage) for rank in self._ranks}

    def note(self, rank: int, stage: str, share: float) -> None:
        """A rank says that a stage is done to ``share`` in [0, 1]."""
        loading = self._loading.get(rank)
        if loading is not None:
            loading.num_stages += stage != loading.stage
            loading.stage, loading.share = stage, share

    def end(self, rank: int) -> None:
        """A rank is done."""
        self._loading.pop(rank, None)

    def look(self, statuses: Sequence[RankStatus], now_s: float) -> HungRank | None:
        """Call twice a second or so, with the ranks' statuses in order and monotonic time."""
        now_s = self._clock.present(now_s)
        loading = dict(self._loading)
        for rank, status in zip(self._ranks, statuses, strict=True):
            if (each := loading.get(rank)) is None:
                continue
            news = (each.num_stages, each.share)
            if news != each.seen:
                each.seen, each.since_s = news, now_s
            if status.num_beats != each.num_beats:
                each.num_beats, each.beat_s = status.num_beats, now_s

        def progress(rank: int) -> tuple[float, ...]:
            return *loading[rank].seen, loading[rank].since_s

        stuck = min(loading, key=progress, default=None)
        if stuck is None or now_s - loading[stuck].since_s <= self._timeout_s:
            return None
        silent = [rank for rank, each in loading.items() if now_s - each.beat_s > self._timeout_s]
        rank = min(silent, key=progress, default=stuck)
        last = loading[rank]
        stood_s = now_s - last.since_s
        return HungRank(
            rank,
            f"has come no further for {stood_s:.0f} s than {last.stage!r}, {last.share:.0%} done, which "
            f"rank_load_timeout_s ({self._timeout_s:g}) does not allow: see what it waits for (files, its device, "
            "other hosts), or raise the setting if all is well and it only needs longer",
        )
