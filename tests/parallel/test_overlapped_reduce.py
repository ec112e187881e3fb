"""Large steps are summed in parts, each on its way while the next one is computed; the result is the whole's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from headrace.layers.linear import RowParallelLinear
from headrace.parallel.overlapped_reduce import OverlappedReduce
from headrace.parallel.state import ParallelState
from headrace.runtime.cuda_graph import BUCKETS
from tests.layers.dict_weights import DictWeights, context, random_tensors
from tests.parallel.thread_group import run_ranks


def overlapped(num_parts: int, told: list[str] | None = None) -> OverlappedReduce:
    told = [] if told is None else told
    return OverlappedReduce(None, num_parts, lambda: told.append("enter"), lambda: told.append("leave"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_parts", "num_rows", "count"), [(4, 8192, 4), (4, 3000, 2), (2, 8192, 2), (2, 2048, 1)]
)
def test_parts_hold_every_row_once(num_parts: int, num_rows: int, count: int) -> None:
    parts = overlapped(num_parts).parts(num_rows)
    assert len(parts) == count
    assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))


def test_steps_that_may_be_graphs_stay_whole() -> None:
    assert len(overlapped(64).parts(max(BUCKETS))) == 1


def test_sums_start_behind_their_part_and_are_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Sum:
        def wait(self) -> None:
            told.append("wait")

    def all_reduce(x: torch.Tensor, group: object, async_op: bool) -> Sum:
        assert async_op
        x *= 2
        told.append(f"sum {len(x)}")
        return Sum()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    out = torch.zeros(3000, 2)
    reduce = overlapped(2, told)

    def compute(rows: slice) -> None:
        told.append("compute")
        out[rows] = torch.arange(3000.0)[rows, None]

    reduce.run(out, reduce.parts(3000), compute)
    assert torch.equal(out, 2 * torch.arange(3000.0)[:, None].expand(3000, 2))
    assert told == ["compute", "sum 1500", "compute", "sum 1500", "enter", "wait", "wait", "leave"]


def test_a_row_parallel_layer_gives_what_it_gives_whole() -> None:
    weights = random_tensors({"m.weight": (6, 8), "m.bias": (6,)})
    x = torch.randn(3000, 8, generator=torch.Generator().manual_seed(1))

    class InTurn(OverlappedReduce):
        """Through the threads' own sums, which wait."""

        def __init__(self, parallel: ParallelState) -> None:
            super().__init__(None, 2, lambda: None, lambda: None)  # type: ignore[arg-type]
            self._communicator = parallel.communicator

        def run(self, out, parts, compute) -> None:
            for rows in parts:
                compute(rows)
                self._communicator.all_reduce(out[rows])

    def work(parallel: ParallelState) -> tuple[torch.Tensor, torch.Tensor]:
        mine = x[:, parallel.share(8, "columns")].contiguous()
        outs = torch.full((2, 3000, 6), torch.nan)
        for out, state in zip(outs, (parallel, replace(parallel, overlap=InTurn(parallel))), strict=True):
            RowParallelLinear(context(DictWeights(weights), state), "m", 8, 6, has_bias=True)(mine, out)
        return outs[0], outs[1]

    for whole, in_parts in run_ranks(2, work):
        torch.testing.assert_close(in_parts, whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole, x @ weights["m.weight"].T + weights["m.bias"], rtol=1e-4, atol=1e-4)
