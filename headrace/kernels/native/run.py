"""Running one op on torch's number of threads, and what its arguments share."""

from __future__ import annotations

import ctypes

import torch

from headrace.kernels.native.library import library

_ELEMENTS_PER_THREAD = 16_384
"""Fewer are done sooner by one thread than it takes to wake others."""


def run(args: ctypes.Structure, num_elements: int, num_pieces: int | None = None) -> None:
    """Run an op that touches about ``num_elements`` numbers, and shares them out in no more than ``num_pieces``."""
    wanted = 1 + num_elements // _ELEMENTS_PER_THREAD
    if num_pieces is not None:
        wanted = max(1, min(wanted, num_pieces))
    library().run(args, min(wanted, torch.get_num_threads()))


def check_rows(**tensors: torch.Tensor) -> None:
    """Kernels walk over rows by their stride, and over the numbers of a row without."""
    for name, tensor in tensors.items():
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"{name}: the last dimension must be dense"
