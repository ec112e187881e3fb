"""Who is taken for hung, and who is not."""

from __future__ import annotations

from headrace.parallel.rank_status import Activity, RankStatus
from headrace.runtime.rank_watch import BUSY_PATIENCE, HungRank, RankWatch

TIMEOUT_S = 8.0


class Watched:
    """Statuses of some ranks, all in step 7, and a clock."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.statuses = [RankStatus() for _ in range(num_ranks)]
        self.watch = RankWatch(range(num_ranks), TIMEOUT_S)
        self.now_s = 100.0
        self.frozen: RankStatus | None = None
        for status in self.statuses:
            status.begin_step(7)

    def pass_time(self, seconds: float, has_work: bool = True) -> HungRank | None:
        """Look every half second, as the group does; the first verdict."""
        for _ in range(int(seconds * 2)):
            for status in self.statuses:
                if status is not self.frozen:
                    status.beat(status.busy_ms)
            verdict = self.watch.look(self.statuses, 7, has_work, self.now_s)
            if verdict is not None:
                return verdict
            self.now_s += 0.5
        return None


def test_a_rank_that_stands_still_while_others_wait_for_it() -> None:
    watched = Watched()
    watched.statuses[0].enter_wait()
    assert watched.pass_time(TIMEOUT_S) is None
    verdict = watched.pass_time(2)
    assert verdict is not None and verdict.rank == 1 and "got nowhere for 8 s" in verdict.why


def test_a_process_that_is_frozen_while_it_waits() -> None:
    watched = Watched(3)
    for status in watched.statuses:
        status.enter_wait()
    watched.statuses[0].leave_wait()
    watched.frozen = watched.statuses[1]
    assert watched.pass_time(TIMEOUT_S) is None
    verdict = watched.pass_time(2)
    assert verdict is not None and verdict.rank == 1 and "no sign of life for 8 s" in verdict.why
    watched = Watched()
    watched.frozen = watched.statuses[1]
    for status in watched.statuses:
        status.end_step()
    assert watched.pass_time(60, has_work=False) is None, "without work nobody is hurt"


def test_a_rank_that_never_begins_the_step() -> None:
    watched = Watched(3)
    watched.statuses[2] = RankStatus()
    for status in watched.statuses[:2]:
        status.enter_wait()
    verdict = watched.pass_time(12)
    assert verdict is not None and verdict.rank == 2
    assert watched.statuses[2].activity is Activity.IDLE


def test_a_rank_that_computes_is_given_time() -> None:
    watched = Watched()
    watched.statuses[0].enter_wait()
    for second in range(int(TIMEOUT_S) * BUSY_PATIENCE - 2):
        watched.statuses[1].beat(second * 900)
        assert watched.pass_time(1) is None
    verdict = None
    for second in range(20):
        watched.statuses[1].beat((100 + second) * 900)
        verdict = verdict or watched.pass_time(1)
    assert verdict is not None and verdict.rank == 1


def test_progress_and_idleness_are_no_hangs() -> None:
    watched = Watched()
    for _ in range(20):
        watched.statuses[0].enter_wait()
        watched.statuses[1].leave_wait()
        assert watched.pass_time(4) is None
    for status in watched.statuses:
        status.end_step()
    assert watched.pass_time(100, has_work=False) is None
    assert watched.pass_time(TIMEOUT_S - 1) is None, "the clock starts with the work"


def test_all_wait_for_each_other() -> None:
    watched = Watched()
    watched.statuses[1].enter_wait()
    watched.statuses[0].enter_wait()
    watched.statuses[0].leave_wait()
    watched.statuses[0].enter_wait()
    verdict = watched.pass_time(12)
    assert verdict is not None and verdict.rank == 1 and "waits for other ranks" in verdict.why


def test_devices_that_never_finish() -> None:
    watched = Watched()
    for status in watched.statuses:
        status.end_step()
    verdict = watched.pass_time(12)
    assert verdict is not None and "waited for their devices" in verdict.why


def test_time_in_which_the_watcher_itself_was_stopped_counts_for_nobody() -> None:
    watched = Watched()
    watched.statuses[0].enter_wait()
    assert watched.pass_time(3) is None
    watched.now_s += 100  # a laptop that slept
    watched.frozen = watched.statuses[1]
    assert watched.pass_time(TIMEOUT_S - 4) is None
    verdict = watched.pass_time(6)
    assert verdict is not None and verdict.rank == 1, "but what hung before or hangs since is found"


def test_a_status_travels_as_numbers() -> None:
    here, there = RankStatus(), RankStatus()
    here.begin_step(3)
    here.beat(50)
    here.enter_wait()
    there.take(here.numbers())
    assert (there.step_begun, there.step_ended, there.activity, there.busy_ms) == (3, 0, Activity.WAITS, 50)
    assert (there.num_ticks, there.num_beats) == (2, 1)
