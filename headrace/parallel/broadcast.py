"""One message to all ranks of a host at the cost of one copy: a ring of bytes in shared memory, and a doorbell each.

The doorbell is the rank's socket: 4 bytes that say how much is new. A rank on another host gets the message itself
through its socket. A message larger than the ring goes round it in pieces, as fast as the slowest rank takes them.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Mapping

from headrace.parallel.shared_region import SharedRegion

_BELL = struct.Struct("<I")
_LAST = 1 << 31
_NAP_S = 100e-6


class Broadcaster:
    """The sending side.

    Args:
        sockets: {rank: its socket}.
        region: the memory shared with them; None when they are on other hosts.
        check: called while waiting for ranks to take what is there; raises when that is in vain.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        region: SharedRegion | None,
        check: Callable[[], None],
    ) -> None:
        self._sockets = dict(sockets)
        self._region = region
        self._check = check
        self._written = 0

    def send(self, message: bytes) -> None:
        """To every rank. Raises OSError when a rank is gone, and what ``check`` raises."""
        if self._region is None:
            for rank_socket in self._sockets.values():
                rank_socket.sendall(_BELL.pack(len(message) | _LAST) + message)
            return
        piece_bytes = self._region.ring_bytes // 2
        view = memoryview(message)
        for start in range(0, len(view), piece_bytes):
            piece = view[start : start + piece_bytes]
            self._put(self._region, piece)
            is_last = start + len(piece) == len(view)
            bell = _BELL.pack(len(piece) | (_LAST if is_last else 0))
            for rank_socket in self._sockets.values():
                rank_socket.sendall(bell)

    def _put(self, region: SharedRegion, piece: memoryview) -> None:
        self._wait_for_room(region, len(piece))
        start = self._written % region.ring_bytes
        head = min(len(piece), region.ring_bytes - start)
        region.ring[start : start + head] = piece[:head]
        region.ring[: len(piece) - head] = piece[head:]
        self._written += len(piece)

    def _wait_for_room(self, region: SharedRegion, num_bytes: int) -> None:
        limit = self._written + num_bytes - region.ring_bytes
        while min(region.read_position(rank)[0] for rank in self._sockets) < limit:
            self._check()
            time.sleep(_NAP_S)


class Receiver:
    """The side of one rank.

    Args:
        rank_socket: the rank's end of its socket.
        rank: which.
        region: the memory shared with the sender; None when that is on another host.
    """

    def __init__(self, rank_socket: socket.socket, rank: int, region: SharedRegion | None) -> None:
        self._socket = rank_socket
        self._region = region
        self._position = None if region is None else region.read_position(rank)

    def receive(self) -> bytes | None:
        """The next message; None when the sender is gone."""
        message = bytearray()
        while True:
            bell = receive_exactly(self._socket, _BELL.size)
            if bell is None:
                return None
            (word,) = _BELL.unpack(bell)
            piece = self._take(word & ~_LAST)
            if piece is None:
                return None
            message += piece
            if word & _LAST:
                return bytes(message)

    def _take(self, num_bytes: int) -> bytes | bytearray | None:
        region, position = self._region, self._position
        if region is None or position is None:
            return receive_exactly(self._socket, num_bytes)
        start = position[0] % region.ring_bytes
        head = min(num_bytes, region.ring_bytes - start)
        piece = bytes(region.ring[start : start + head]) + bytes(region.ring[: num_bytes - head])
        position[0] += num_bytes
        return piece


def receive_exactly(source: socket.socket, num_bytes: int) -> bytearray | None:
    """So many bytes; None when the other side closed before they came."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        try:
            count = source.recv_into(view)
        except ConnectionError:
            return None
        if not count:
            return None
        view = view[count:]
    return data
