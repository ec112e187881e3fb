"""TensorFiles: tensors of files, or parts of them, read into memory of their own."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from headrace.checkpoint.file_reader import FileReader
from headrace.checkpoint.file_stamp import FileStamp

_MIN_PIECE_BYTES = 4096
"""Parts of rows that are shorter are cut out of whole rows: a read of its own would cost more than it spares."""


class TensorFiles:
    """Reads from files that are opened when they are needed, and again after ``close``.

    Args:
        stamps: by path, what the files were when their headers were read.
    """

    def __init__(self, stamps: Mapping[str, FileStamp]) -> None:
        self._stamps = stamps
        self._readers: dict[str, FileReader] = {}

    def close(self) -> None:
        """Let go of the files."""
        self._readers.clear()

    def read(
        self,
        path: str,
        begin: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        index: tuple[slice, ...],
        out: Tensor | None = None,
    ) -> Tensor:
        """The part ``index`` (a slice with plain bounds for every dimension) of the tensor [*shape] that lies at byte
        ``begin``: in ``out``, if that is its shape and type and it can be read straight into it, else in fresh memory.

        Raises: CheckpointError when the file has lost bytes of it.
        """
        if path not in self._readers:
            self._readers[path] = FileReader(Path(path), self._stamps[path])
        file = self._readers[path]
        sizes = tuple(part.stop - part.start for part in index)
        row_bytes = prod(shape[1:]) * dtype.itemsize
        first = begin + (index[0].start * row_bytes if index else 0)
        has_whole_rows = sizes[1:] == shape[1:]
        has_pieces = len(shape) == 2 and sizes[1] * dtype.itemsize >= _MIN_PIECE_BYTES and not has_whole_rows
        stored = sizes if has_pieces else sizes[:1] + shape[1:]
        if out is None or not _can_hold(out, stored, dtype):
            out = torch.empty(stored, dtype=dtype, device="cpu")
        if has_pieces:
            first += index[1].start * dtype.itemsize
            for number, row in enumerate(out.view(torch.uint8).numpy()):
                file.read_into(row.data, first + number * row_bytes)
        else:
            file.read_into(out.view(-1).view(torch.uint8).numpy().data, first)
        return out if has_pieces or has_whole_rows else out[(slice(None), *index[1:])]


def _can_hold(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    is_alike = out.shape == shape and out.dtype == dtype
    return is_alike and out.device.type == "cpu" and out.is_contiguous()
