"""Native embedding and gather_rows against the reference ops, over dense and packed tables."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.native.embedding import embedding, gather_rows
from headrace.kernels.native.linear import pack_weight
from headrace.kernels.reference import embedding as reference
from tests.kernels.native.guarded import guarded, random_rows

TYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


@pytest.mark.parametrize("table_type", TYPES)
@pytest.mark.parametrize("out_type", TYPES)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 24.3])
def test_embedding(table_type: torch.dtype, out_type: torch.dtype, is_packed: bool, scale: float) -> None:
    table = random_rows(53, 41, torch.float32).to(table_type)
    ids = torch.tensor([0, 52, 15, 16, 17, 3, 3])
    expected = torch.empty(7, 41, dtype=out_type)
    reference.embedding(ids, table, expected, scale)
    out = guarded(7, 41, out_type)
    embedding(ids, pack_weight(table) if is_packed else table, out.view, scale)
    # The reference rounds to the output's type before it multiplies.
    tolerance = 0 if scale == 1.0 else 2 * torch.finfo(out_type).eps
    torch.testing.assert_close(out.view, expected, rtol=tolerance, atol=0)
    out.check()


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_part_of_the_vocabulary(is_packed: bool) -> None:
    table = random_rows(20, 9, torch.float32)
    ids = torch.tensor([4, 5, 24, 25, 1 << 40, 7])
    expected = torch.empty(6, 9)
    reference.embedding(ids, table, expected, 1.0, 5)
    out = guarded(6, 9, torch.float32)
    embedding(ids, pack_weight(table) if is_packed else table, out.view, 1.0, 5)
    assert torch.equal(out.view, expected)
    out.check()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [[], [4], [8, 0, 3, 3, 1]])
def test_gather_rows(rows: list[int], dtype: torch.dtype) -> None:
    x = random_rows(9, 45, dtype)
    out = guarded(len(rows), 45, dtype)
    gather_rows(x, torch.tensor(rows, dtype=torch.int64), out.view)
    assert torch.equal(out.view, x[rows])
    out.check()
