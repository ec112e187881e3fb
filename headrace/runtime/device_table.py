"""DeviceTable: a persistent int32 table on the device, changed a few rows at a time from the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.runtime.upload import upload

Write = tuple[int, int, "list[int] | np.ndarray"]


class DeviceTable:
    """[num_rows, num_columns] int32.

    Attributes:
        tensor: the table on the device.
        host: the same numbers on the host, or None. On the CPU it is the same memory; on other devices a copy that
            is kept only if asked for, and that does not see what the device itself writes.

    Args:
        keep_host_copy: keep ``host`` on every device.
    """

    def __init__(
        self, num_rows: int, num_columns: int, device: torch.device, *, keep_host_copy: bool = False
    ) -> None:
        self.tensor = torch.zeros((num_rows, num_columns), dtype=torch.int32, device=device)
        self.host: np.ndarray | None = None
        if device.type == "cpu":
            self.host = self.tensor.numpy()
        elif keep_host_copy:
            self.host = np.zeros((num_rows, num_columns), np.int32)

    def write(self, writes: Sequence[Write]) -> None:
        """Put runs of numbers at (row, first column); no two runs may overlap."""
        if self.host is not None:
            for row, column, values in writes:
                self.host[row, column : column + len(values)] = values
        if self.tensor.device.type == "cpu" or not writes:
            return
        width = self.tensor.shape[1]
        places = [np.arange(len(values)) + (row * width + column) for row, column, values in writes]
        numbers = [np.asarray(values, np.int32) for _, _, values in writes]
        flat, changed = upload([np.concatenate(places), np.concatenate(numbers)], self.tensor.device)
        self.tensor.view(-1).index_copy_(0, flat, changed)

    def put(self, places: np.ndarray, device_places: torch.Tensor, numbers: torch.Tensor) -> None:
        """Put ``numbers`` [N], on the device, at flat places, given on the host and on the device."""
        if self.tensor.device.type == "cpu" and self.host is not None:
            self.host.reshape(-1)[places] = numbers.numpy()
        else:
            self.tensor.view(-1).index_copy_(0, device_places, numbers.int())

    def take(self, places: np.ndarray, device_places: torch.Tensor) -> torch.Tensor:
        """[N] int64 on the device: the numbers at flat places, given on the host and on the device."""
        if self.tensor.device.type == "cpu" and self.host is not None:
            return torch.from_numpy(self.host.reshape(-1)[places].astype(np.int64))
        return self.tensor.view(-1).index_select(0, device_places).long()

    def take_rows(self, rows: np.ndarray, device_rows: torch.Tensor, num_columns: int) -> torch.Tensor:
        """[N, num_columns] int32 on the device: the beginning of rows, given on the host and on the device."""
        if self.tensor.device.type == "cpu" and self.host is not None:
            return torch.from_numpy(self.host[rows, :num_columns])
        return self.tensor[:, :num_columns].index_select(0, device_rows)
