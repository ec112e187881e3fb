"""all_reduce_add_norm against all_reduce and add_rms_norm. The other ranks are played: their parts and words are there
before the kernel looks. (Ranks that run at the same time: benchmarks/parallel/bench_collectives.py.)"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.reference.norm import add_rms_norm
from headrace.kernels.triton.all_reduce import SharedRows, all_reduce_add_norm
from tests.kernels.triton_setup import DEVICE, HALF, max_error, relative_error

EPS = 1e-5
PROGRAMS = 32


class Played:
    """Memory of all ranks, of which one is real."""

    def __init__(self, size: int, rank: int, max_rows: int, width: int, dtype: torch.dtype) -> None:
        self.rank, self.size = rank, size
        self.parts = [
            torch.full((2, max_rows * width), torch.nan, dtype=dtype, device=DEVICE) for _ in range(size)
        ]
        self.flags = [torch.zeros(PROGRAMS, size, dtype=torch.int32, device=DEVICE) for _ in range(size)]
        table = [
            torch.tensor([each.data_ptr() for each in memory], device=DEVICE)
            for memory in (self.parts, self.flags)
        ]
        self.shared = SharedRows(*table, rank, max_rows, width, PROGRAMS)

    def others_are_done(self, turns: torch.Tensor, parts: torch.Tensor) -> None:
        """What the other ranks would have written: parts [ranks, T, E], their words for the turn of each program."""
        for peer in range(self.size):
            if peer != self.rank:
                for program, turn in enumerate(turns.tolist()):
                    self.flags[self.rank][program, peer] = turn
                for row, values in enumerate(parts[peer]):
                    place, start = int(turns[row % PROGRAMS]) % 2, row * parts.shape[2]
                    self.parts[peer][place, start : start + parts.shape[2]] = values


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_sum_residual_and_norm(size: int, rank: int, dtype: torch.dtype) -> None:
    width, generator = 48, torch.Generator(device=DEVICE).manual_seed(size)
    played = Played(size, rank, 70, width, dtype)
    turns = torch.zeros(PROGRAMS, dtype=torch.int64)
    for num_rows in (1, 3, 70, 2, 1):
        parts = torch.randn(size, num_rows, width, generator=generator, device=DEVICE).to(dtype)
        residual = torch.randn(num_rows, width, generator=generator, device=DEVICE).to(dtype)
        weight = torch.rand(width, generator=generator, device=DEVICE) + 0.5
        turns[: min(num_rows, PROGRAMS)] += 1
        played.others_are_done(turns, parts)
        x, expected = parts[rank].clone(), torch.empty_like(residual)
        summed, total = parts.float().sum(0).to(dtype), residual.clone()
        add_rms_norm(summed, total, weight, EPS, expected)
        all_reduce_add_norm(played.shared, x, residual, weight, EPS, x)
        assert relative_error(residual, total) < max_error(dtype)
        assert relative_error(x, expected) < max_error(dtype)
    assert played.shared.turns.tolist() == turns.tolist()
    told = played.flags[(rank + 1) % size][:, rank]
    assert told.tolist() == turns.tolist(), "the others are told of each turn"
