"""Shares of heads and columns over ranks."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import ConfigError
from headrace.parallel.state import ParallelState, SoloCommunicator


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_shares_cover_everything_once(size: int) -> None:
    shares = [ParallelState(rank, size).share(6, "things") for rank in range(size)]
    assert [item for share in shares for item in range(6)[share]] == list(range(6))


def test_unequal_shares_are_refused_with_the_sizes_that_work() -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size 4 does not divide 6 attention heads; .* \[1, 2, 3, 6\]"
    ):
        ParallelState(0, 4).share(6, "attention heads")


def test_kv_heads_are_shared_by_neighbours_when_ranks_outnumber_them() -> None:
    heads = [ParallelState(rank, 6).kv_share(2) for rank in range(6)]
    assert heads == [slice(0, 1)] * 3 + [slice(1, 2)] * 3
    assert [ParallelState(rank, 2).kv_share(4) for rank in range(2)] == [slice(0, 2), slice(2, 4)]
    for size, count in ((3, 2), (4, 6)):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size {size} .* {count} KV heads"):
            ParallelState(0, size).kv_share(count)


def test_collectives_of_one_rank() -> None:
    x, out = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
    group = SoloCommunicator()
    group.all_gather(x, out)
    group.all_reduce(x)
    assert torch.equal(out, torch.arange(6.0).view(2, 3)) and torch.equal(x, out)
    group.all_gather(x, x)
    assert torch.equal(x, out)
