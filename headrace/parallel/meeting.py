"""Where ranks meet: a store of keys, in a file on one host or at an address."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import FileStore, Store, TCPStore

MEETING_TIMEOUT = timedelta(minutes=10)
"""For the last rank to come: other hosts may still be loading images."""


def open_store(rendezvous: str, num_ranks: int, hosts: bool = False) -> Store:
    """The store at "file:///path" or "tcp://host:port".

    hosts: this process holds the store that others come to (TCP only).
    """
    kind, _, place = rendezvous.partition("://")
    if kind == "file":
        return FileStore(place, num_ranks)
    address, _, port = place.rpartition(":")
    return TCPStore(
        address, int(port), num_ranks, is_master=hosts, timeout=MEETING_TIMEOUT, wait_for_workers=False
    )
