"""WeightMemory: tensors one behind another, in memory that stays as long as they do."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from headrace.kernels.native.weight_memory import WeightMemory


def test_tensors_are_apart_aligned_and_keep_their_values() -> None:
    memory = WeightMemory()
    sources = [
        torch.arange(count, dtype=torch.float32).to(dtype)
        for count in (1, 33, 0, 70_000)
        for dtype in (torch.uint8, torch.bfloat16, torch.float32)
    ]
    kept = [memory.keep(source) for source in sources]
    for source, tensor in zip(sources, kept, strict=True):
        assert tensor.dtype == source.dtype and torch.equal(tensor, source)
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


def test_a_matrix_as_large_as_a_chunk_and_the_ones_beside_it() -> None:
    memory = WeightMemory()
    small, large = memory.empty((3, 5), torch.float32), memory.empty((70 << 20,), torch.uint8)
    small.fill_(1.0)
    large.fill_(2)
    after = memory.empty((4,), torch.float32).fill_(3.0)
    assert (small == 1).all() and (large == 2).all() and (after == 3).all()


def test_a_tensor_outlives_its_memory() -> None:
    tensor = WeightMemory().empty((1 << 20,), torch.uint8).fill_(9)
    gc.collect()
    assert (tensor == 9).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")
def test_huge_pages_are_asked_for() -> None:
    """And the memory is this process's own: memory that is shared gets none."""
    tensor = WeightMemory().empty((8 << 20,), torch.uint8).fill_(1)
    assert tensor.data_ptr() % (2 << 20) == 0
    assert "hg" in _flags(tensor.data_ptr()) and "sh" not in _flags(tensor.data_ptr())


def _flags(address: int) -> list[str]:
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_here = start <= address < end
        elif is_here and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the address is in no mapping")
