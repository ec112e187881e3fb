"""Which rank is taken for hung while all load, and when none is."""

from __future__ import annotations

from headrace.parallel.rank_status import RankStatus
from headrace.runtime.load_watch import LoadWatch
from headrace.runtime.rank_watch import HungRank

TIMEOUT_S = 100.0


class Watched:
    """Three ranks that load, those of them whose process is stopped, and a clock."""

    def __init__(self) -> None:
        self.watch = LoadWatch(range(3), TIMEOUT_S)
        self.statuses = [RankStatus() for _ in range(3)]
        self.stopped: set[int] = set()
        self.now_s = 50.0
        self.watch.begin("starting")

    def pass_time(self, seconds: float) -> HungRank | None:
        """Look every second; the first verdict."""
        for _ in range(int(seconds)):
            for rank, status in enumerate(self.statuses):
                if rank not in self.stopped:
                    status.beat(0)
            verdict = self.watch.look(self.statuses, self.now_s)
            if verdict is not None:
                return verdict
            self.now_s += 1.0
        return None


def test_the_rank_furthest_behind_is_named_with_its_stage() -> None:
    watched = Watched()
    assert watched.pass_time(30) is None
    for rank, share in ((0, 1.0), (1, 0.37), (2, 0.9)):
        watched.watch.note(rank, "loading weights", share)
    watched.watch.note(0, "making room for KV blocks", 0.0)
    assert watched.pass_time(TIMEOUT_S) is None, "since its last news"
    verdict = watched.pass_time(5)
    assert verdict is not None and verdict.rank == 1
    for part in ("for 101 s", "'loading weights', 37% done", "rank_load_timeout_s (100)"):
        assert part in verdict.why


def test_one_that_never_says_a_word() -> None:
    watched = Watched()
    for rank in (0, 2):
        watched.watch.note(rank, "meeting the other ranks", 0.0)
    verdict = watched.pass_time(110)
    assert verdict is not None and verdict.rank == 1 and "'starting'" in verdict.why


def test_whoever_waits_for_a_slow_rank_does_not_hang() -> None:
    watched = Watched()
    watched.watch.end(0)
    watched.watch.note(2, "loading weights", 1.0)
    watched.watch.note(2, "making room for KV blocks", 0.0)
    for percent in range(100):
        watched.watch.note(1, "loading weights", percent / 100)
        assert watched.pass_time(50) is None
    watched.watch.end(1)
    verdict = watched.pass_time(5)
    assert verdict is not None and verdict.rank == 2, "nothing is left that it could wait for"


def test_a_stopped_process_is_named_before_those_that_wait_for_it() -> None:
    watched = Watched()
    watched.stopped.add(2)
    for rank in (1, 0, 2):
        assert watched.pass_time(5) is None
        watched.watch.note(rank, "meeting the other ranks", 0.0)
    verdict = watched.pass_time(110)
    assert verdict is not None and verdict.rank == 2 and "'meeting the other ranks'" in verdict.why
    for percent in range(100):  # nobody is named while the last comes further
        watched.watch.note(2, "loading weights", 1.0)
        for rank in (0, 1):
            watched.watch.note(rank, "loading weights", percent / 100)
        assert watched.pass_time(50) is None


def test_nothing_is_timed_when_all_are_done() -> None:
    watched = Watched()
    for rank in range(3):
        watched.watch.end(rank)
    assert watched.pass_time(1000) is None
    watched.watch.note(1, "late news", 0.5)
    assert watched.pass_time(1000) is None
    watched.watch.begin("replacing weights")
    verdict = watched.pass_time(110)
    assert verdict is not None and "'replacing weights'" in verdict.why


def test_time_in_which_the_watcher_itself_was_stopped_counts_for_nobody() -> None:
    watched = Watched()
    assert watched.pass_time(50) is None
    watched.now_s += 5000  # a laptop that slept
    assert watched.pass_time(49) is None
    assert watched.pass_time(5) is not None
