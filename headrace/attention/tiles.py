"""The tiles of a step, which planners cut into items: query rows, each with the range of keys that some of them see.

The rows of a request are cut into tiles. A shared prefix is taken out of its requests' ranges and planned once, for
tiles of rows gathered from all of them (cascade). Everything is computed for all requests at once, on the host.

Legend: R requests, N gathered query rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.attention.metadata import AttentionMetadata

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Tiles:
    """Arrays over tiles, each with the KV range [low, high).

    row_start, num_rows: into the gathered query rows.
    request: whose block table holds the range.
    num_sisters: tiles of the same request or prefix.
    is_merged: the rows have items elsewhere too, so even a single item writes partials.
    is_shared: the range is a shared prefix.
    """

    row_start: Ints
    num_rows: Ints
    request: Ints
    low: Ints
    high: Ints
    num_sisters: Ints
    is_merged: npt.NDArray[np.bool_]
    is_shared: npt.NDArray[np.bool_]


def step_tiles(metadata: AttentionMetadata, tile_rows: int) -> tuple[Ints, Ints, Tiles]:
    """One step of one KV group in tiles of up to ``tile_rows`` rows: (tokens [N] of the gathered query rows, their
    positions [N], tiles). Reads lengths only, never the block table's entries."""
    starts = metadata.query_starts.astype(np.int64)
    context_lens = metadata.context_lens.astype(np.int64)
    query_lens = starts[1:] - starts[:-1]
    request = np.repeat(np.arange(len(query_lens)), query_lens)
    tokens = np.arange(len(request))
    positions = tokens + (context_lens - starts[1:])[request]
    tiles = _request_tiles(metadata, starts, context_lens, tile_rows)
    if metadata.shared_prefixes:
        shared_rows, shared = _prefix_tiles(metadata, starts, positions, tile_rows)
        shared.row_start += len(tokens)
        tokens = np.concatenate((tokens, shared_rows))
        both: list[Any] = [
            np.concatenate((getattr(tiles, name), getattr(shared, name))) for name in Tiles.__slots__
        ]
        tiles = Tiles(*both)
    return tokens, positions[tokens], tiles


def _request_tiles(metadata: AttentionMetadata, starts: Ints, context_lens: Ints, tile_rows: int) -> Tiles:
    """Each request's own rows against its own range, from the end of its shared prefix on."""
    query_lens = starts[1:] - starts[:-1]
    num_tiles = -(-query_lens // tile_rows)
    request, index = ranges(num_tiles)
    done = index * tile_rows
    num_rows = np.minimum(query_lens[request] - done, tile_rows)
    first = (context_lens - query_lens)[request] + done
    low = np.zeros_like(first)
    if metadata.shared_prefixes:
        prefix_lens = np.zeros_like(context_lens)
        for group in metadata.shared_prefixes:
            ends = prefix_lens[group.requests]
            prefix_lens[group.requests] = np.maximum(ends, group.num_blocks * metadata.block_size)
        low = prefix_lens[request]
    is_merged = low > 0
    if metadata.window is not None:
        low = np.maximum(low, first - (metadata.window - 1))
    row_start, high, is_shared = starts[request] + done, first + num_rows, np.zeros(len(low), bool)
    return Tiles(row_start, num_rows, request, low, high, num_tiles[request], is_merged, is_shared)


def _prefix_tiles(
    metadata: AttentionMetadata, starts: Ints, positions: Ints, tile_rows: int
) -> tuple[Ints, Tiles]:
    """Rows [N'] gathered from the requests of each shared prefix, and their tiles against it."""
    groups = metadata.shared_prefixes
    members = np.concatenate([group.requests for group in groups])
    member_rows = (starts[1:] - starts[:-1])[members]
    member, offset = ranges(member_rows)
    rows = starts[members][member] + offset

    last_members = np.cumsum([len(group.requests) for group in groups])
    group_ends = np.cumsum(member_rows)[last_members - 1]
    group_rows = np.diff(group_ends, prepend=0)
    num_tiles = -(-group_rows // tile_rows)
    group, index = ranges(num_tiles)
    done = index * tile_rows
    row_start = (group_ends - group_rows)[group] + done
    num_rows = np.minimum(group_rows[group] - done, tile_rows)
    # the request of a tile's earliest row holds all blocks that its rows see; later ones may have released some
    num_requests = len(starts) - 1
    earliest = np.minimum.reduceat(positions[rows] * num_requests + members[member], row_start)
    high = np.array([entry.num_blocks for entry in groups])[group] * metadata.block_size
    low = np.array([entry.first_block for entry in groups])[group] * metadata.block_size
    if metadata.window is not None:
        low = np.maximum(low, earliest // num_requests - (metadata.window - 1))
    yes = np.ones(len(low), bool)
    tiles: list[Any] = [
        *(row_start, num_rows, earliest % num_requests, low, high),
        *(num_tiles[group], yes, yes),
    ]
    seen = low < high
    return rows, Tiles(*(values[seen] for values in tiles))


def ranges(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [2, 3]: owners [0, 0, 1, 1, 1] and indices within them [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (ends - counts)[owner]
