"""Triton embedding and gather_rows against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.reference import embedding as reference
from headrace.kernels.triton.embedding import embedding, gather_rows
from tests.kernels.triton_setup import DEVICE, HALF


def check(rows: int, vocab: int, width: int, table_type: torch.dtype, out_type: torch.dtype) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(width)
    table = torch.randn(vocab, width, generator=generator, device=DEVICE).to(table_type)
    ids = torch.randint(0, vocab, (rows,), generator=generator, device=DEVICE)
    for scale in (1.0, 25.3):
        for first_row in (None, vocab // 3):
            outs = [torch.full((rows, width), torch.nan, dtype=out_type, device=DEVICE) for _ in range(2)]
            embedding(ids, table, outs[0], scale, first_row)
            reference.embedding(ids, table, outs[1], scale, first_row)
            assert torch.equal(*outs)
    out = torch.empty(rows, width, dtype=table_type, device=DEVICE)
    gather_rows(table, ids, out)
    assert torch.equal(out, table[ids])


@pytest.mark.parametrize("out_type", [torch.float32, HALF])
def test_rows_by_index(out_type: torch.dtype) -> None:
    check(5, 30, 40, HALF, out_type)
    check(2, 7, 1100, out_type, out_type)
    check(0, 7, 16, out_type, out_type)


@pytest.mark.gpu
def test_large() -> None:
    check(1000, 128256, 4096, torch.bfloat16, torch.bfloat16)
