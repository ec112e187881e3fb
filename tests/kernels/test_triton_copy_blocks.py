"""Triton copy_blocks against the reference, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.reference.copy_blocks import copy_blocks as reference_copy_blocks
from headrace.kernels.triton.copy_blocks import copy_blocks
from tests.kernels.triton_setup import DEVICE


@dataclass
class Layout:
    num_planes: int
    block_size: int
    token_bytes: int
    scale_bytes: int = 0


def check(layout: Layout, num_blocks: int, num_copies: int) -> None:
    generator = torch.Generator().manual_seed(num_copies)
    size = layout.num_planes * layout.block_size * layout.token_bytes
    blocks = torch.randint(0, 256, (num_blocks, size), generator=generator, dtype=torch.uint8).to(DEVICE)
    ids = torch.randperm(num_blocks, generator=generator).to(DEVICE)
    src, dst = ids[:num_copies], ids[num_copies : 2 * num_copies]
    lengths = torch.randint(0, layout.block_size + 1, (num_copies,), generator=generator).to(DEVICE)
    expected = blocks.clone()
    reference_copy_blocks(expected, src, dst, lengths, layout)
    copy_blocks(blocks, src, dst, lengths, layout)
    assert torch.equal(blocks, expected)


@pytest.mark.parametrize("token_bytes", [256, 12, 6, 5])
def test_copies(token_bytes: int) -> None:
    check(Layout(6, 16, token_bytes), 9, 4)
    check(Layout(6, 16, token_bytes), 9, 0)


@pytest.mark.gpu
def test_large() -> None:
    check(Layout(32 * 2 * 8, 16, 256), 200, 90)
