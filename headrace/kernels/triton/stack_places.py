"""Columns of the table of places: elements from a base to each layer's own tensor; the four matrices come first."""

from __future__ import annotations

from enum import IntEnum


class Place(IntEnum):
    """Which tensor of a layer."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3
    BIAS = 4
    NORM_1 = 5
    NORM_2 = 6
    Q_NORM = 7
    K_NORM = 8
    K_CACHE = 9
    V_CACHE = 10


NUM_PLACES = len(Place)
