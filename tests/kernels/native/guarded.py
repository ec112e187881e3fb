"""Tensors in the middle of larger buffers, so that a test sees what is written outside, and alignments vary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FILL = 7.0


@dataclass
class Guarded:
    """view: [rows, width] inside ``buffer``, whose other numbers are 7."""

    buffer: torch.Tensor
    view: torch.Tensor

    def check(self) -> None:
        """Nothing outside the view was written. The view's own numbers are lost."""
        self.view.fill_(_FILL)
        assert (self.buffer == _FILL).all(), "memory outside the output was written"


def guarded(rows: int, width: int, dtype: torch.dtype, first: int = 1) -> Guarded:
    """An output whose rows begin ``first`` elements into wider ones."""
    buffer = torch.full((rows + 2, width + first + 3), _FILL, dtype=dtype)
    return Guarded(buffer, buffer[1 : rows + 1, first : first + width])


def random_rows(rows: int, width: int, dtype: torch.dtype, first: int = 1, seed: int = 0) -> torch.Tensor:
    """An input whose rows begin ``first`` elements into wider ones; the rest is NaN."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.full((rows, width + first + 2), torch.nan, dtype=dtype)
    view = buffer[:, first : first + width]
    view.copy_(torch.randn(rows, width, generator=generator))
    return view
