"""OverlappedReduce: the sum of a large step in parts, each of which is on its way while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist

_MIN_PART_ROWS = 1025
"""Products of fewer rows are slower by the row, and their sums too short to hide. Steps that may be graphs, of up to
2048 rows, stay whole: parts of buffers cannot be recorded."""


class OverlappedReduce:
    """Sums over a group's ranks beside what the caller computes meanwhile.

    Args:
        group: the ranks.
        num_parts: how many parts a step's rows are cut into at most.
        enter_wait, leave_wait: called around waiting for the sums.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_parts: int,
        enter_wait: Callable[[], None],
        leave_wait: Callable[[], None],
    ) -> None:
        self._group = group
        self._num_parts = num_parts
        self._enter_wait = enter_wait
        self._leave_wait = leave_wait

    def parts(self, num_rows: int) -> list[slice]:
        """Of so many rows; one, when they are too few to be cut."""
        count = max(1, min(self._num_parts, num_rows // _MIN_PART_ROWS))
        bounds = [num_rows * part // count for part in range(count + 1)]
        return [slice(first, last) for first, last in pairwise(bounds)]

    def run(self, out: torch.Tensor, parts: list[slice], compute: Callable[[slice], None]) -> None:
        """out [T, n] = sum of all ranks', where ``compute`` writes this rank's ``out[rows]``. On a GPU nothing waits
        but the stream."""
        sums = []
        for rows in parts:
            compute(rows)
            work = dist.all_reduce(out[rows], group=self._group, async_op=True)
            assert work is not None, "this rank belongs to the group"
            sums.append(work)
        self._enter_wait()
        for work in sums:
            work.wait()
        self._leave_wait()
