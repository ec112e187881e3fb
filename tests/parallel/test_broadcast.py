"""The ring in shared memory and its doorbells: every reader gets every message, whatever its size and pace."""

from __future__ import annotations

import os
import random
import socket
import threading
import time

import pytest

from headrace.parallel.broadcast import Broadcaster, Receiver
from headrace.parallel.shared_region import SharedRegion, create_fd

RING = 1 << 12


def setup(num_ranks: int, is_shared: bool) -> tuple[Broadcaster, list[Receiver], list[socket.socket]]:
    pairs = [socket.socketpair() for _ in range(num_ranks)]
    region = None
    if is_shared:
        fd = create_fd(num_ranks, RING)
        region = SharedRegion(fd, num_ranks, RING)
        os.close(fd)
    sender = Broadcaster({rank: ours for rank, (ours, _) in enumerate(pairs)}, region, lambda: None)
    receivers = [Receiver(theirs, rank, region) for rank, (_, theirs) in enumerate(pairs)]
    return sender, receivers, [end for pair in pairs for end in pair]


@pytest.mark.parametrize("is_shared", [True, False])
def test_every_reader_gets_every_message(is_shared: bool) -> None:
    rng = random.Random(0)
    sizes = [1, 5, RING // 2, RING // 2 + 1, RING, 3 * RING + 7] + [rng.randrange(1, 900) for _ in range(300)]
    rng.shuffle(sizes)
    messages = [rng.randbytes(size) for size in sizes]
    sender, receivers, _ends = setup(3, is_shared)
    received: list[list[bytes]] = [[] for _ in receivers]

    def read(rank: int) -> None:
        for number in range(len(messages)):
            if number % (20 * rank + 17) == 0:
                time.sleep(0.001 * rank)
            message = receivers[rank].receive()
            assert message is not None
            received[rank].append(message)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for message in messages:
        sender.send(message)
    for thread in threads:
        thread.join(20)
    assert received == [messages] * 3


def test_a_reader_learns_that_the_sender_is_gone() -> None:
    _, [receiver], [ours, _theirs] = setup(1, True)
    ours.close()
    assert receiver.receive() is None


def test_waiting_for_room_asks_whether_it_is_in_vain() -> None:
    ours, _theirs = socket.socketpair()
    fd = create_fd(1, RING)
    region = SharedRegion(fd, 1, RING)
    os.close(fd)
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise TimeoutError

    sender = Broadcaster({0: ours}, region, check)
    sender.send(bytes(RING // 2))
    sender.send(bytes(RING // 2))
    with pytest.raises(TimeoutError):
        sender.send(b"x")


def test_ranks_see_each_others_memory_apart() -> None:
    fd = create_fd(2, RING)
    one, other = SharedRegion(fd, 2, RING), SharedRegion(fd, 2, RING)
    os.close(fd)
    one.status_cells(0)[0] = 5
    one.status_cells(1)[7] = 6
    one.read_position(1)[0] = 9
    one.ring[0] = 7
    assert other.status_cells(0).tolist() == [5] + [0] * 7 and other.status_cells(1).tolist() == [0] * 7 + [6]
    assert (other.read_position(0)[0], other.read_position(1)[0], other.ring[0]) == (0, 9, 7)
