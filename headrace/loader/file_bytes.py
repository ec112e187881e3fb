"""map_file, tensor_at: a file's bytes as torch tensors, without copying."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import CheckpointError


def map_file(path: Path) -> Tensor:
    """The whole file as a uint8 tensor over a private mapping: pages load when touched, and a stray write would
    change this process's copy only, never the file.

    Raises:
        CheckpointError: the file is gone or cannot be mapped.
    """
    try:
        size = path.stat().st_size
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be mapped into memory: {error}") from error


_SMALL_BYTES = 1 << 20


def tensor_at(file: Tensor, begin: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Bytes ``begin`` to ``end`` of a mapped file as a tensor. It is copied where the file leaves it misaligned, and if
    it is small: a norm that is kept as a view would keep the whole file in memory beside the packed weights.
    """
    data = file[begin:end]
    if data.numel() == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if begin % dtype.itemsize or len(data) <= _SMALL_BYTES:
        data = data.clone()
    return data.view(dtype).view(shape)
