"""The order in which a batch that is there as a whole is handed to the core: longest answers first.

The device is used well while many answers grow side by side, and badly at the end, when a few long ones that started
late go on alone. Started in order of falling length, all end at about the same time (longest processing time first:
R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969). What an answer will come to is not known; its
``max_tokens`` stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def in_offline_order(batch: Iterable[Item], policy: str, max_tokens_of: Callable[[Item], int]) -> list[Item]:
    """The batch in order of falling ``max_tokens``; equal ones keep their order.

    Args:
        policy: ``SchedulerConfig.policy``; any other than "fcfs" has an order of its own, and the batch stays as it is.
    """
    if policy != "fcfs":
        return list(batch)
    return sorted(batch, key=max_tokens_of, reverse=True)
