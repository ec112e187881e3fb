"""Buffers are shared by name, views keep their identity, and reserving makes addresses stay."""

from __future__ import annotations

import torch

from headrace.kernels.arena import Arena


def test_buffers_are_shared_by_name_width_and_dtype() -> None:
    arena = Arena("cpu")
    buffer = arena.buffer("x", 8, torch.float32)
    assert arena.buffer("x", 8, torch.float32) is buffer
    others = [
        arena.buffer("y", 8, torch.float32),
        arena.buffer("x", 9, torch.float32),
        arena.buffer("x", 8, torch.half),
    ]
    assert buffer not in others and arena.buffers() == [buffer, *others]


def test_views_are_the_same_object_while_the_number_of_rows_stays() -> None:
    buffer = Arena("cpu").buffer("x", 3, torch.float32)
    view = buffer.rows(4)
    assert view.shape == (4, 3) and buffer.rows(4) is view
    smaller = buffer.rows(2)
    assert smaller.data_ptr() == view.data_ptr() and smaller.shape == (2, 3)
    assert buffer.rows(0).shape == (0, 3)


def test_reserved_buffers_do_not_move() -> None:
    arena = Arena("cpu")
    buffers = [arena.buffer("x", 3, torch.float32), arena.buffer("y", 5, torch.bfloat16)]
    assert arena.num_bytes == 0
    arena.reserve(16)
    assert arena.num_bytes == 16 * (3 * 4 + 5 * 2)
    places = [buffer.rows(16).data_ptr() for buffer in buffers]
    for num_rows in (1, 16, 5):
        assert [buffer.rows(num_rows).data_ptr() for buffer in buffers] == places
    arena.reserve(4)
    assert arena.num_bytes == 16 * (3 * 4 + 5 * 2)
