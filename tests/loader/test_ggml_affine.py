"""ggml blocks as integers and scales: the same numbers, bit for bit, as decoding them."""

from __future__ import annotations

import pytest
import torch

from headrace.checkpoint.gguf_types import BLOCK_SIZES, GGMLType
from headrace.kernels.reference.linear_packed import embedding_packed
from headrace.loader.ggml_affine import affine_matrix, is_affine
from headrace.loader.ggml_dequantize import dequantize_ggml
from headrace.loader.weight_data import PackedBlocks

TYPES = [GGMLType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")]
_HALF_BYTES = {GGMLType.Q4_0: (0,), GGMLType.Q5_0: (0,), GGMLType.Q8_0: (0,), GGMLType.Q6_K: (208,)}


def random_blocks(ggml_type: GGMLType, num_rows: int, num_columns: int) -> PackedBlocks:
    """Any bits, but for the fp16 numbers, which are of ordinary size."""
    generator = torch.Generator().manual_seed(int(ggml_type))
    numbers, size = BLOCK_SIZES[ggml_type]
    shape = (num_rows, num_columns // numbers, size)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for at in _HALF_BYTES.get(ggml_type, (0, 2)):
        half = torch.randn((*shape[:2], 1), generator=generator).half()
        blocks[..., at : at + 2] = half.view(torch.uint8)
    return PackedBlocks(blocks.view(num_rows, -1), ggml_type, (num_rows, num_columns))


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_the_numbers_are_those_of_the_blocks(ggml_type: GGMLType) -> None:
    packed = random_blocks(ggml_type, 7, 512)
    decoded = torch.empty(7, 512)
    dequantize_ggml(packed.data, ggml_type, decoded)
    matrix = affine_matrix(packed)
    assert torch.equal(matrix.dequantize(), decoded)
    out = torch.empty(2, 512)
    embedding_packed(torch.tensor([6, 1]), matrix, out)
    assert torch.equal(out, decoded[[6, 1]])


def test_other_types_are_not_affine() -> None:
    assert [kind for kind in GGMLType if is_affine(kind)] == sorted(TYPES)
