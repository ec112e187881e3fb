"""One rank's own process: ``python -m headrace.runtime.rank_main <socket fd> <region fd> <ring bytes> <rank> <ranks>
<log level>``.

It does what the messages of its executor say, in order, and ends when told to, when a step fails, or when its standard
input closes, which is how it learns that its parent is gone, whatever its main thread is waiting for.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

from headrace.parallel.broadcast import Receiver
from headrace.parallel.rank_status import RankStatus
from headrace.parallel.shared_region import SharedRegion
from headrace.runtime.rank_loop import RankLoop

_SWITCH_S = 5e-4
"""Results are sent by a thread beside the one that launches steps, which would keep it waiting for 5 ms."""


def main(arguments: list[str]) -> int:
    """Serve as one rank. Returns the exit status."""
    socket_fd, region_fd, ring_bytes, rank, num_ranks, level = map(int, arguments)
    logging.basicConfig(
        stream=sys.stderr, level=level, format=f"%(levelname)s %(name)s [rank {rank}]: %(message)s"
    )
    # The parent decides when this process ends; a Ctrl-C or a service manager's SIGTERM reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    sys.setswitchinterval(_SWITCH_S)
    region = SharedRegion(region_fd, num_ranks, ring_bytes)
    rank_socket = socket.socket(fileno=socket_fd)
    loop = RankLoop(
        rank, rank_socket, Receiver(rank_socket, rank, region), RankStatus(region.status_cells(rank))
    )
    return loop.run()


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Not by way of the interpreter's end: communicators whose other ranks are gone would wait for them.
    os._exit(status)
