"""embedding and gather_rows: whole tables, parts of one, and tables in a narrower type."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference.embedding import embedding, gather_rows
from headrace.kernels.reference.linear import pack_weight

IDS = torch.tensor([3, 0, 9, 3])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_times_scale(stored: torch.dtype) -> None:
    table = torch.randn(10, 6, generator=torch.Generator().manual_seed(0)).to(stored)
    out = torch.full((4, 6), torch.nan)
    embedding(IDS, table, out)
    assert torch.equal(out, table[IDS].float())
    embedding(IDS, table, out, 2.5)
    assert torch.equal(out, table[IDS].float() * 2.5)


def test_the_scale_is_rounded_like_the_rows() -> None:
    table = torch.ones(10, 2, dtype=torch.bfloat16)
    out = torch.empty(4, 2, dtype=torch.bfloat16)
    embedding(IDS, table, out, 640**0.5)
    assert out[0, 0].item() == 25.25


@pytest.mark.parametrize("num_rows", [200, 13_000])
@pytest.mark.parametrize("first_row", [None, 100])
def test_tables_as_a_head_has_packed_them(num_rows: int, first_row: int | None) -> None:
    """Transposed, or in transposed blocks."""
    table = torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([num_rows - 1, 0, 150, 101])
    plain, packed = torch.empty(4, 3), torch.full((4, 3), torch.nan)
    embedding(ids, table, plain, 2.0, first_row)
    embedding(ids, pack_weight(table), packed, 2.0, first_row)
    assert pack_weight(table).dim() == (2 if num_rows == 200 else 3)
    assert torch.equal(packed, plain)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_of_a_table_add_up_to_the_whole(size: int) -> None:
    table = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    whole, total, part = torch.empty(4, 6), torch.zeros(4, 6), torch.full((4, 6), torch.nan)
    embedding(IDS, table, whole, 3.0)
    each = -(-10 // size)
    for first in range(0, 10, each):
        embedding(IDS, table[first : first + each], part, 3.0, first)
        total += part
    assert torch.equal(total, whole)


def test_gather_rows() -> None:
    x = torch.arange(20.0).view(5, 4)
    out = torch.empty(3, 4)
    gather_rows(x, torch.tensor([4, 0, 4]), out)
    assert torch.equal(out, x[[4, 0, 4]])
