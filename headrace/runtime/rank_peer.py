"""RankPeer: one rank as its executor sees it, and how the ranks of one host are started."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field

from headrace.observe.process_end import describe_end
from headrace.parallel.rank_status import RankStatus
from headrace.parallel.shared_region import SharedRegion, create_fd
from headrace.runtime.rank_messages import RankEar, RankFailed

RING_BYTES = 4 << 20


@dataclass(eq=False)
class RankPeer:
    """One rank.

    Attributes:
        rank: which.
        socket: the executor's end.
        status: what it is doing.
        process: None when it was started by somebody else.
        failed: its last words.
        is_gone: its socket has closed.
    """

    rank: int
    socket: socket.socket
    status: RankStatus
    process: subprocess.Popen[bytes] | None = None
    ear: RankEar = field(default_factory=RankEar)
    failed: RankFailed | None = None
    is_gone: bool = False

    def kill(self) -> None:
        """End it at once; one on another host sees its socket close."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def reap(self, timeout_s: float) -> bool:
        """Wait for its process to end; False if it does not."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self.process.stdin is not None:
            self.process.stdin.close()
        return True

    def epitaph(self) -> str:
        """How it ended: "was ended by SIGKILL"."""
        code = None if self.process is None else self.process.poll()
        if code is None:
            return "closed its connection"
        return describe_end(code)


def start_local_ranks(num_ranks: int, is_whole: bool) -> tuple[list[RankPeer], SharedRegion]:
    """Start processes for the first ``num_ranks`` ranks on this host; they share a region of memory.

    Each one's standard input is its lifeline: it closes with this process, however that ends.

    is_whole: there are no others, on other hosts.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if is_whole and sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may resolve to nothing
    region_fd = create_fd(num_ranks, RING_BYTES)
    region = SharedRegion(region_fd, num_ranks, RING_BYTES)
    peers: list[RankPeer] = []
    try:
        for rank in range(num_ranks):
            peers.append(_start(rank, num_ranks, region, region_fd, environment))
    except BaseException:
        for peer in peers:
            peer.kill()
        raise
    finally:
        os.close(region_fd)
    return peers, region


def _start(
    rank: int, num_ranks: int, region: SharedRegion, region_fd: int, environment: dict[str, str]
) -> RankPeer:
    ours, theirs = socket.socketpair()
    level = max(logging.INFO, logging.getLogger().getEffectiveLevel())
    arguments = [
        theirs.fileno(),
        region_fd,
        RING_BYTES,
        rank,
        num_ranks,
        level if rank == 0 else max(level, 30),
    ]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.runtime.rank_main", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=[theirs.fileno(), region_fd],
            env=environment,
        )
    finally:
        theirs.close()
    return RankPeer(rank, ours, RankStatus(region.status_cells(rank)), process)
