"""PackedWork: an attention plan's work list as the Triton kernels read it, in one int32 buffer on the device.

The buffer begins with a header that says how much there is and where; the parts follow, densely, so that one upload
of just what a step needs fills it, and a kernel in a CUDA graph needs only its address::

    header [16]      counts, and the places of the parts
    rows [N, 2]      (token, position) of the gathered query rows
    items [I, 8]     the fields ITEM_FIELDS and padding; short items first
    reduce_rows [M], reduce_starts [M+1], reduce_slots [P]
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

NUM_ITEMS, NUM_ROWS, NUM_PARTIALS, NUM_REDUCTIONS, NUM_SHORT = range(5)
ROWS_AT, ITEMS_AT, REDUCE_ROWS_AT, REDUCE_STARTS_AT, REDUCE_SLOTS_AT = range(5, 10)
HEADER_SIZE = 16
ITEM_SIZE = 8

ROW_FIELDS = ("query_rows", "row_positions")
ITEM_FIELDS = (
    "item_request",
    "item_kv_start",
    "item_kv_end",
    "item_row_start",
    "item_num_rows",
    "item_partial_start",
)
REDUCE_FIELDS = ("reduce_rows", "reduce_starts", "reduce_slots")

_TILE_ROWS = 128
_SHORT_ROWS = 16

IntArray = npt.NDArray[np.int32]
Scratch = tuple[torch.Tensor, torch.Tensor]


class AttentionWork(Protocol):
    """A work list, as ``headrace.attention.metadata.AttentionPlan`` documents it."""

    block_size: int
    window: int | None
    block_table: torch.Tensor
    num_items: int
    num_rows: int
    num_partials: int
    num_reductions: int
    derived: dict[Hashable, Any]


@dataclass(frozen=True, slots=True)
class TileRows:
    """Query rows of a tile for G query heads a KV head: a tile has rows x G rows for the matrix units.

    short: at most so many in the tiles of the bandwidth-bound kernel.
    long: in one item at most.
    """

    short: int
    long: int

    @classmethod
    def for_group(cls, group: int) -> TileRows:
        """The tile sizes that fill the matrix units' rows: 16 and 128."""
        return cls(max(_SHORT_ROWS // group, 1), max(_TILE_ROWS // group, 1))


@dataclass(slots=True, eq=False)
class PackedWork:
    """One step's work for the kernels.

    buffer: int32 on the device, laid out as above.
    num_short, num_long: items of either kernel.
    num_reductions: rows to merge.
    num_partial_rows: rows of scratch for partials.
    is_fixed: the buffer will be refilled under a CUDA graph, so launches must be right for other counts than this
        step's: grids fill the device, and only ``num_long`` == 0 leaves a kernel out.
    scratch: partials and their log-sums by (heads, head dim), made by the first layer that needs them.
    """

    buffer: torch.Tensor
    num_short: int
    num_long: int
    num_reductions: int
    num_partial_rows: int
    is_fixed: bool = False
    scratch: dict[tuple[int, int], Scratch] = field(default_factory=dict)

    def partials(self, num_heads: int, head_dim: int) -> Scratch:
        """fp32 (partials [rows, H, D], log-sums [rows, H]); what they hold is undefined."""
        key = (num_heads, head_dim)
        if key not in self.scratch:
            rows, device = max(self.num_partial_rows, 1), self.buffer.device
            self.scratch[key] = (
                torch.empty((rows, num_heads, head_dim), dtype=torch.float32, device=device),
                torch.empty((rows, num_heads), dtype=torch.float32, device=device),
            )
        return self.scratch[key]


def packed_size(num_rows: int, num_items: int, num_reductions: int, num_partials: int) -> int:
    """Length of a buffer."""
    return HEADER_SIZE + 2 * num_rows + ITEM_SIZE * num_items + 2 * num_reductions + 1 + num_partials


def pack(arrays: Mapping[str, npt.NDArray[Any]], num_short: int, out: IntArray | None = None) -> IntArray:
    """The buffer of a work list on the host.

    Args:
        arrays: the fields of a plan, at their exact lengths; short items first.
        num_short: how many items are short.
        out: where to put it, at least as long as needed; None: a new array.
    """
    num_rows, num_items = len(arrays["query_rows"]), len(arrays["item_request"])
    num_partials, num_reductions = len(arrays["reduce_slots"]), len(arrays["reduce_rows"])
    size = packed_size(num_rows, num_items, num_reductions, num_partials)
    buffer = np.empty(size, np.int32) if out is None else out[:size]
    rows_at = HEADER_SIZE
    items_at = rows_at + 2 * num_rows
    reduce_at = items_at + ITEM_SIZE * num_items
    starts_at = reduce_at + num_reductions
    slots_at = starts_at + num_reductions + 1
    counts = (num_items, num_rows, num_partials, num_reductions, num_short)
    buffer[:10] = (*counts, rows_at, items_at, reduce_at, starts_at, slots_at)
    rows = buffer[rows_at:items_at].reshape(num_rows, 2)
    for column, name in enumerate(ROW_FIELDS):
        rows[:, column] = arrays[name]
    items = buffer[items_at:reduce_at].reshape(num_items, ITEM_SIZE)
    for column, name in enumerate(ITEM_FIELDS):
        items[:, column] = arrays[name]
    for name, at in zip(REDUCE_FIELDS, (reduce_at, starts_at, slots_at), strict=True):
        buffer[at : at + len(arrays[name])] = arrays[name]
    return buffer


def pack_plan(plan: AttentionWork, group: int) -> PackedWork:
    """The work of a plan that another backend made. Waits for the device; for tests and comparisons."""
    lengths = dict.fromkeys(ITEM_FIELDS, plan.num_items) | dict.fromkeys(ROW_FIELDS, plan.num_rows)
    lengths |= {
        "reduce_rows": plan.num_reductions,
        "reduce_starts": plan.num_reductions + 1,
        "reduce_slots": plan.num_partials,
    }
    arrays = {name: getattr(plan, name)[:length].cpu().numpy() for name, length in lengths.items()}
    is_long = arrays["item_num_rows"] > TileRows.for_group(group).short
    order = np.argsort(is_long, kind="stable")
    arrays |= {name: arrays[name][order] for name in ITEM_FIELDS}
    num_long = int(is_long.sum())
    num_short = plan.num_items - num_long
    buffer = torch.from_numpy(pack(arrays, num_short)).to(plan.block_table.device)
    return PackedWork(buffer, num_short, num_long, plan.num_reductions, plan.num_partials)
