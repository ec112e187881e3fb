"""RankGroup: keeps the ranks of one engine together: speaks to them, hears them, and ends them all when one fails."""

from __future__ import annotations

import contextlib
import logging
import selectors
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from headrace.errors import CheckpointError, ConfigError, EngineDeadError, HeadraceError, error_class
from headrace.parallel.broadcast import Broadcaster
from headrace.parallel.shared_region import SharedRegion
from headrace.runtime.load_watch import LoadWatch
from headrace.runtime.rank_messages import (
    CheckWeights,
    FromRank,
    RankBeat,
    RankFailed,
    RankProgress,
    RankReady,
    RankSpec,
    RankWeights,
    RunStep,
    Stop,
    ToRank,
    UpdateWeights,
)
from headrace.runtime.rank_peer import RankPeer
from headrace.runtime.rank_watch import RankWatch

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_GRACE_S = 0.3
"""Between the first sign of a failure and the verdict: what others say because of it is not its cause."""
_STOP_S = 2.0
_EAR_BYTES = 1 << 20
_LOADS: dict[type, str] = {
    RankSpec: "starting",
    CheckWeights: "checking weights",
    UpdateWeights: "replacing weights",
}
"""What ranks do first that are told so; until they have answered they must get on."""


class RankGroup:
    """Started ranks.

    Args:
        peers: all of them, in order.
        region: the memory shared with those of this host.
        timeout_s, load_timeout_s: a standstill that counts as a hang, in steps and while loading.
        describe: a rank's name for messages.
        on_message: gets (rank, message) on a thread of the group.
        on_failure: gets the error, once, on a thread of the group, when all ranks have been ended.
        awaits_results: whether steps are outstanding.
    """

    def __init__(
        self,
        peers: Sequence[RankPeer],
        region: SharedRegion | None,
        *,
        timeout_s: float,
        load_timeout_s: float,
        describe: Callable[[int], str],
        on_message: Callable[[int, FromRank], None],
        on_failure: Callable[[HeadraceError], None],
        awaits_results: Callable[[], bool],
    ) -> None:
        self._peers = list(peers)
        self._describe = describe
        self._on_message = on_message
        self._on_failure = on_failure
        self._awaits_results = awaits_results
        ranks = [peer.rank for peer in self._peers]
        self._watch, self._load_watch = RankWatch(ranks, timeout_s), LoadWatch(ranks, load_timeout_s)
        self._encoder = msgspec.msgpack.Encoder()
        self._last_step = 0
        self._failed: list[RankPeer] = []
        self._is_stopping = False
        self._alarm = threading.Event()
        self._verdict = threading.Event()
        self.failure: HeadraceError | None = None
        local = {peer.rank: peer.socket for peer in self._peers if peer.process is not None}
        remote = {peer.rank: peer.socket for peer in self._peers if peer.process is None}
        self._broadcasters = [
            Broadcaster(sockets, shared, self._check)
            for sockets, shared in ((remote, None), (local, region))
            if sockets
        ]
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._hear, "rank-ear"), (self._guard, "rank-guard"))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: ToRank) -> None:
        """To all ranks. Raises EngineDeadError when one has failed."""
        self._check()
        if isinstance(message, RunStep):
            self._last_step = message.scheduler_output.step_id
        elif (stage := _LOADS.get(type(message))) is not None:
            self._load_watch.begin(stage)
        data = self._encoder.encode(message)
        try:
            for broadcaster in self._broadcasters:
                broadcaster.send(data)
        except OSError:
            self._verdict.wait(10 * _GRACE_S)  # the guard finds out who is gone
            self._check()
            raise EngineDeadError("the engine stopped: a rank is gone") from None

    def shutdown(self) -> None:
        """Tell the ranks to end, and end those that do not. Calling twice is allowed."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self.failure is None:
            with contextlib.suppress(OSError, HeadraceError):
                for broadcaster in self._broadcasters:
                    broadcaster.send(self._encoder.encode(Stop()))
        deadline_s = time.monotonic() + _STOP_S
        for peer in self._peers:
            if not peer.reap(max(0.0, deadline_s - time.monotonic())):
                peer.kill()
                peer.reap(_STOP_S)
        self._alarm.set()
        for peer in self._peers:
            peer.kill()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_STOP_S)
        for peer in self._peers:
            peer.socket.close()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    # ---- the ear ----------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.socket, selectors.EVENT_READ, peer)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._take(key.data):
                        selector.unregister(key.fileobj)

    def _take(self, peer: RankPeer) -> bool:
        """What a rank has said; False when it will say no more."""
        try:
            data = peer.socket.recv(_EAR_BYTES)
        except OSError:
            data = b""
        if not data:
            peer.is_gone = True
            self._alarm.set()
            return False
        for message in peer.ear.hear(data):
            if isinstance(message, RankFailed):
                peer.failed = message
                self._failed.append(peer)
                self._alarm.set()
            elif isinstance(message, RankBeat):
                peer.status.take(message.status)
            else:
                if isinstance(message, RankProgress):
                    self._load_watch.note(peer.rank, message.stage, message.share)
                elif isinstance(message, RankReady | RankWeights):
                    self._load_watch.end(peer.rank)
                self._on_message(peer.rank, message)
        return True

    # ---- the guard --------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        while not self._is_stopping:
            error: HeadraceError | None = None
            if self._alarm.wait(_LOOK_S):
                time.sleep(_GRACE_S)
                if not self._is_stopping:
                    error = self._autopsy()
            else:
                error = self._look_for_hangs()
            if error is not None:
                return self._end_all(error)

    def _look_for_hangs(self) -> HeadraceError | None:
        statuses, now_s = [peer.status for peer in self._peers], time.monotonic()
        hung = self._watch.look(statuses, self._last_step, self._awaits_results(), now_s)
        hung = hung or self._load_watch.look(statuses, now_s)
        if hung is None:
            return None
        peer = next(peer for peer in self._peers if peer.rank == hung.rank)
        return self._death_of(peer, hung.why)

    def _autopsy(self) -> HeadraceError:
        """The cause. A rank that died without a word comes before those that spoke: they complain that it is gone."""
        silent = [peer for peer in self._peers if peer.is_gone and peer.failed is None]
        for peer in silent:
            peer.reap(_GRACE_S)
        if silent:
            return self._death_of(silent[0], silent[0].epitaph())
        peer = self._failed[0]
        assert peer.failed is not None
        return self._last_words(peer, peer.failed)

    def _last_words(self, peer: RankPeer, words: RankFailed) -> HeadraceError:
        kind = error_class(words.kind)
        is_loading = not peer.status.step_begun
        if kind is not None and is_loading:  # what a user can mend keeps its class
            is_everyones = issubclass(kind, (ConfigError, CheckpointError))
            message = words.message if is_everyones else f"{self._describe(peer.rank)}: {words.message}"
            return kind(message)
        logger.error("%s failed:\n%s", self._describe(peer.rank), words.trace)
        return self._death_of(peer, f"failed with {words.kind}: {words.message}")

    def _death_of(self, peer: RankPeer, how: str) -> EngineDeadError:
        begun, ended = peer.status.step_begun, peer.status.step_ended
        if not begun:
            last = "before its first step"
        else:
            last = f"its last step was {begun}, " + ("completed" if begun == ended else "not completed")
        return EngineDeadError(f"the engine stopped: {self._describe(peer.rank)} {how} ({last})")

    def _end_all(self, error: HeadraceError) -> None:
        """Nothing can go on without one of them; and none may be left over."""
        logger.error("%s", error)
        self.failure = error
        self._verdict.set()
        for peer in self._peers:
            peer.kill()
        for peer in self._peers:
            peer.reap(_STOP_S)
        self._on_failure(error)
