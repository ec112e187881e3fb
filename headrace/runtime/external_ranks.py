"""Ranks that an outside launcher starts, on any number of hosts.

All processes run the same command. Rank 0's becomes the engine and has a rank of its own as a child; the others become
ranks, connect to it and serve until it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time

from headrace.errors import ConfigError
from headrace.parallel.broadcast import Receiver, receive_exactly
from headrace.parallel.launch import LaunchPlace
from headrace.parallel.meeting import MEETING_TIMEOUT, open_store
from headrace.parallel.rank_status import RankStatus
from headrace.runtime.rank_loop import RankLoop
from headrace.runtime.rank_peer import RankPeer

logger = logging.getLogger(__name__)

_CONTROL = "headrace/control"
_HELLO = struct.Struct("<16sI")
_GRACE_S = 2.0


def rendezvous_of(place: LaunchPlace) -> str:
    """The address at which all ranks of a launch meet."""
    return f"tcp://{place.address}:{place.port}"


def await_external_ranks(place: LaunchPlace) -> tuple[list[RankPeer], object]:
    """On rank 0: wait for all other ranks to connect; (they, what must be kept as long as they run).

    Only who knows the word that lies in the store is taken for a rank.

    Raises: ConfigError when some do not come in time.
    """
    store = open_store(rendezvous_of(place), place.size, hosts=not place.has_agent)
    word = secrets.token_hex(8)
    with socket.create_server(("", 0)) as server:
        store.set(_CONTROL, f"{server.getsockname()[1]} {word}")
        deadline_s = time.monotonic() + MEETING_TIMEOUT.total_seconds()
        peers: dict[int, RankPeer] = {}
        while len(peers) < place.size - 1:
            server.settimeout(max(0.1, deadline_s - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, place.size)) - peers.keys())
                raise ConfigError(
                    f"ranks {missing} did not come within {MEETING_TIMEOUT.total_seconds():.0f} s; start all "
                    f"{place.size} processes with the same command"
                ) from None
            peer = _greet(connection, word)
            if peer is not None:
                peers[peer.rank] = peer
    return [peers[rank] for rank in sorted(peers)], store


def _greet(connection: socket.socket, word: str) -> RankPeer | None:
    connection.settimeout(_GRACE_S)
    with contextlib.suppress(TimeoutError):
        hello = receive_exactly(connection, _HELLO.size)
        if hello is not None:
            said, rank = _HELLO.unpack(hello)
            if secrets.compare_digest(said, word.encode()):
                connection.settimeout(None)
                _keep_talking(connection)
                return RankPeer(rank, connection, RankStatus())
    connection.close()
    return None


def serve_external_rank(place: LaunchPlace) -> int:
    """On the other ranks: connect to rank 0 and serve. Returns the exit status when rank 0 has ended."""
    store = open_store(rendezvous_of(place), place.size)
    store.wait([_CONTROL], MEETING_TIMEOUT)
    port, word = store.get(_CONTROL).decode().split()
    connection = socket.create_connection((place.address, int(port)))
    _keep_talking(connection)
    connection.sendall(_HELLO.pack(word.encode(), place.rank))
    threading.Thread(target=_end_with_engine, args=(connection,), name="lifeline", daemon=True).start()
    receiver = Receiver(connection, place.rank, None)
    return RankLoop(place.rank, connection, receiver, RankStatus(), sends_beats=True).run()


def _end_with_engine(connection: socket.socket) -> None:
    """Whatever the main thread waits for, this process ends soon after its engine."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    poll.poll()
    time.sleep(_GRACE_S)
    logger.error("the engine is gone; this rank ends")
    os._exit(1)


def _keep_talking(connection: socket.socket) -> None:
    """Steps are small messages that must not wait for each other, and a silent host must be noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
