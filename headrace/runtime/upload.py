"""Small host arrays to the device, many in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_ALIGNMENT_BYTES = 16

_DTYPES: dict[Any, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.uint8): torch.uint8,
}


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors of the same shapes and types on the device. On the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return upload_packed(arrays, device)


def upload_packed(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """All arrays in one copy, from pinned memory that torch keeps until the copy is done; it runs beside the host."""
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    staging = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
    host = staging.numpy()
    for array, start in zip(arrays, starts, strict=True):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = staging.to(device, non_blocking=True)
    return [
        packed[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
