"""Packed uploads give back the same arrays; tables take writes."""

from __future__ import annotations

import numpy as np
import torch

from headrace.runtime.device_table import DeviceTable
from headrace.runtime.upload import upload, upload_packed

CPU = torch.device("cpu")


def test_packed_arrays_keep_shape_type_and_numbers() -> None:
    arrays = [
        np.arange(5, dtype=np.int32),
        np.array([[1.5, -2.5], [3.0, 4.0]], np.float32),
        np.zeros(0, np.int64),
        np.array([2**62, -(2**62)], np.int64),
        np.arange(12, dtype=np.float64).reshape(3, 4).T,
        np.array([1, 255], np.uint8),
    ]
    for send in (upload, upload_packed):
        for array, tensor in zip(arrays, send(arrays, CPU), strict=True):
            assert tuple(tensor.shape) == array.shape
            assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)


def test_upload_shares_memory_on_the_cpu() -> None:
    array = np.zeros(3, np.int64)
    (tensor,) = upload([array], CPU)
    array[1] = 9
    assert tensor.tolist() == [0, 9, 0]


def test_table_writes() -> None:
    table = DeviceTable(3, 5, CPU, keep_host_copy=True)
    table.write([(0, 3, [7, 8]), (2, 0, np.array([1, 2, 3]))])
    assert table.tensor.tolist() == [[0, 0, 0, 7, 8], [0] * 5, [1, 2, 3, 0, 0]]
    assert table.host is not None and table.host.tolist() == table.tensor.tolist()


def test_takes_agree_with_the_tensor() -> None:
    table = DeviceTable(3, 5, CPU)
    table.tensor.copy_(torch.arange(15).view(3, 5))
    places = np.array([14, 0, 7, 7])
    taken = table.take(places, torch.from_numpy(places))
    assert taken.dtype == torch.int64 and taken.tolist() == [14, 0, 7, 7]
    rows = np.array([2, 0])
    taken = table.take_rows(rows, torch.from_numpy(rows), 2)
    assert taken.dtype == torch.int32 and taken.tolist() == [[10, 11], [0, 1]]
    host, table.host = table.host, None  # as on other devices
    assert table.take(places, torch.from_numpy(places)).tolist() == [14, 0, 7, 7]
    assert table.take_rows(rows, torch.from_numpy(rows), 2).tolist() == [[10, 11], [0, 1]]
    assert host is not None
