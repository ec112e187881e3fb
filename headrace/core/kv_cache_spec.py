"""What the KV memory of a model's layers looks like, as the control plane sees it."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_LEVELS = 3
"""Spans that one request may read together with others in a step; attention's buffers are sized for so many."""


class KVCacheSpec(msgspec.Struct, frozen=True):
    """One KV group: layers of one kind that share a block table and are allocated together.

    kind: "full" keeps every token; "sliding" only needs the last ``window``; "latent" is full with one compressed
        vector a token; "state" keeps one state a request (refused today by the KV cache manager).
    layer_ids: the model's layers in this group, in order; padding entries are -1 (groups of one model have equal
        numbers of layers, so that all groups' blocks have the same size and come from one pool).
    bytes_per_block: bytes of one block over all layers of the group, scales included.
    window: for "sliding": a token at position p attends to positions > p - window.
    """

    kind: Literal["full", "sliding", "latent", "state"]
    layer_ids: tuple[int, ...]
    bytes_per_block: int
    window: int | None = None


def group_layers(layer_windows: tuple[int | None, ...]) -> list[tuple[int | None, tuple[int, ...]]]:
    """Cut layers into groups of equal size, each of one window: [(window, layer ids padded with -1)].

    The group size is the smallest number of layers that share a window (as vLLM's hybrid KV cache does), so a model
    with 15 sliding and 3 full layers becomes 5 + 1 groups of 3.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        kinds.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in kinds.values())
    groups: list[tuple[int | None, tuple[int, ...]]] = []
    for window, layers in kinds.items():
        for start in range(0, len(layers), size):
            chunk = layers[start : start + size]
            groups.append((window, tuple(chunk + [-1] * (size - len(chunk)))))
    return groups
