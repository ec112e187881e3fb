"""Sums over ranks and the norms after them become one call of a recorded forward, which gives the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.op_plan import record
from headrace.kernels.reference.norm import add_rms_norm
from headrace.kernels.triton.reduce_fusion import fuse_reductions
from headrace.parallel.state import ParallelState
from tests.models.paged_model import PagedModel
from tests.models.tiny_models import TINY_MODELS, save
from tests.parallel.thread_group import run_ranks


@pytest.mark.parametrize(("name", "num_left"), [("llama", 1), ("gemma3", 11)])
def test_fused_plans_give_the_same(name: str, num_left: int, tmp_path: Path) -> None:
    """The embedding's sum is followed by no addition; Gemma norms each sum before it is added."""
    folder = save(TINY_MODELS[name].make(), tmp_path)
    tokens = torch.arange(5, 25)

    def work(parallel: ParallelState) -> bool:
        paged = PagedModel(folder, parallel=parallel)

        def fused(
            x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
        ) -> None:
            parallel.communicator.all_reduce(x)
            add_rms_norm(x, residual, weight, eps, out)

        work = [(0, tokens[:1])]
        plan = record(paged.model, paged.batch(work))
        shorter = fuse_reductions(plan, fused)
        names = [call.name for call in shorter.calls]
        assert names.count("all_reduce") == num_left
        if num_left == 1:
            assert len(plan) - len(shorter) == names.count("all_reduce_add_norm") == 2 * paged.arch.num_layers
        batch = paged.batch([(0, tokens)])
        expected = plan.replay(batch).clone()
        return torch.equal(shorter.replay(batch), expected)

    assert run_ranks(2, work) == [True, True]
