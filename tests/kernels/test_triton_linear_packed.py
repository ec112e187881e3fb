"""Triton linear_packed and embedding_packed against the reference, over all the ways that they take."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.affine_matrix import AffineMatrix
from headrace.kernels.reference import linear_packed as reference
from headrace.kernels.triton import linear_packed as triton_ops
from headrace.kernels.triton.packed_config import PackedConfig
from headrace.kernels.triton.packed_pair_kernel import staged_halves
from headrace.kernels.triton.packed_shapes import (
    DecodedShape,
    PackedPairShape,
    PackedRowShape,
    PackedTileShape,
    PackedWgmmaShape,
    pair_shape,
    wgmma_shape,
)
from tests.kernels.affine_matrices import KINDS, Kind, random_matrix
from tests.kernels.triton_setup import DEVICE, HALF, max_error, relative_error


def check(
    matrix: AffineMatrix,
    num_rows: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    has_bias: bool = False,
    shape: triton_ops.Shape | None = None,
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, matrix.num_columns, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(matrix.num_rows, generator=generator).to(DEVICE) if has_bias else None
    on_device = matrix.to(DEVICE)
    exact = x.double() @ on_device.dequantize().double().T + (0.0 if bias is None else bias.double())
    out = torch.full((num_rows, matrix.num_rows + 5), 7.0, dtype=out_dtype, device=DEVICE)
    triton_ops.linear_packed(x, triton_ops.pack_matrix(on_device), bias, out, 3, shape=shape)
    if num_rows:
        error = relative_error(out[:, 3 : 3 + matrix.num_rows], exact)
        # scales of two levels are multiplied and rounded to fp16; weights are rounded to the type of x
        assert error < max(max_error(dtype), max_error(out_dtype), 1e-3)
    assert (out[:, :3] == 7.0).all() and (out[:, 3 + matrix.num_rows :] == 7.0).all()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kinds(kind: Kind, num_rows: int) -> None:
    check(random_matrix(kind, 13, 256), num_rows, torch.float32, torch.float32, has_bias=num_rows == 1)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 17, 70])
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[4]], ids=str)
def test_rows(kind: Kind, num_rows: int) -> None:
    check(random_matrix(kind, 37, 192), num_rows, HALF, HALF, has_bias=True)
    check(random_matrix(kind, 5, 96), num_rows, HALF, torch.float32)


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_columns", [12, 64, 100, 130])
def test_one_scale_a_row_for_any_width(num_columns: int, bits: int, num_rows: int) -> None:
    check(random_matrix(Kind(bits, group=None), 9, num_columns), num_rows, torch.float32, torch.float32)


@pytest.mark.parametrize("block_w", [16, 32, 64])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_row_in_rounds(kind: Kind, block_w: int) -> None:
    for num_columns in (512, 768):
        matrix = random_matrix(kind, 11, num_columns)
        check(matrix, 1, HALF, HALF, shape=PackedRowShape(4, block_w, 1))


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tiles(kind: Kind, splits: int) -> None:
    matrix = random_matrix(kind, 35, 768)
    shape = PackedTileShape(16, 16, 2, 1, splits)
    check(matrix, 19, HALF, torch.float32, has_bias=splits != 2, shape=shape)
    check(matrix, 3, torch.float32, torch.float32, has_bias=splits == 2, shape=shape)


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed: int) -> None:
    choose = random.Random(seed)
    bits, group = choose.choice([4, 8]), choose.choice([16, 32, 64, 128, 192, None])
    num_columns = choose.randrange(1, 6) * (group or 32) + (0 if group else choose.randrange(16))
    kind = Kind(bits, group, has_minimums=choose.random() < 0.5)
    matrix = random_matrix(kind, choose.randrange(1, 80), num_columns, seed)
    tile = PackedTileShape(16, choose.choice([16, 32]), 2, 1, choose.choice([1, 2, 3]))
    row = PackedRowShape(choose.choice([1, 2, 8]), choose.choice([16, 32, 128]), 1)
    dtype = choose.choice([torch.float32, HALF])
    out_dtype = choose.choice([dtype, torch.float32])
    check(matrix, choose.randrange(1, 40), dtype, out_dtype, choose.random() < 0.5, tile)
    check(matrix, 1, dtype, out_dtype, choose.random() < 0.5, row)
    check(matrix, choose.randrange(1, 6), dtype, out_dtype, choose.random() < 0.5, DecodedShape(1 << 15))


def test_many_rows_are_multiplied_with_decoded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "MAX_TILED_ROWS", 4)
    monkeypatch.setattr(triton_ops, "MAX_FP32_ROWS", 4)
    monkeypatch.setattr(triton_ops, "_DECODED", DecodedShape(5 * 64 * 4))
    for kind in (KINDS[1], KINDS[4]):
        check(random_matrix(kind, 12, 64), 6, torch.float32, torch.float32, has_bias=True)


def test_inputs_may_be_rounded() -> None:
    matrix = random_matrix(KINDS[1], 9, 64).to(DEVICE)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out, expected = torch.empty(2, 9, device=DEVICE), torch.empty(2, 9, device=DEVICE)
    triton_ops.linear_packed(x, triton_ops.pack_matrix(matrix), None, out, 0, True)
    reference.linear_packed(x, matrix, None, expected, 0, True)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_embedding(kind: Kind, dtype: torch.dtype) -> None:
    matrix = random_matrix(kind, 8, 256).to(DEVICE)
    packed = triton_ops.pack_matrix(matrix)
    for scale, first_row, ids in ((1.0, None, [7, 0, 7]), (1.5, 4, [3, 4, 12])):
        numbers = torch.tensor(ids, device=DEVICE)
        expected = torch.empty(3, 256, dtype=dtype, device=DEVICE)
        reference.embedding_packed(numbers, matrix, expected, scale, first_row)
        out = torch.full_like(expected, torch.nan)
        triton_ops.embedding_packed(numbers, packed, out, scale, first_row)
        assert relative_error(out, expected) < max(1e-3, max_error(dtype))


def _wgmma(block_t: int, block_n: int, splits: int = 1) -> PackedWgmmaShape:
    return PackedWgmmaShape(block_t, block_n, 3, min(8, block_n // 16), splits)


@pytest.mark.gpu
@pytest.mark.skipif(not triton_ops.has_wgmma(), reason="needs a GPU of Hopper's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_wgmma_kinds(kind: Kind, dtype: torch.dtype) -> None:
    matrix = random_matrix(kind, 150, 768)
    check(matrix, 19, dtype, dtype, has_bias=True, shape=_wgmma(32, 64))
    check(matrix, 61, dtype, torch.float32, has_bias=True, shape=_wgmma(64, 128, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not triton_ops.has_wgmma(), reason="needs a GPU of Hopper's")
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("num_rows", [2, 16, 17, 64])
def test_wgmma_rows(num_rows: int, block_n: int) -> None:
    block_t = max(16, 1 << (num_rows - 1).bit_length())
    for kind, num_columns in ((Kind(4, 32), 1120), (Kind(8, 32), 864)):  # no whole chunks
        check(random_matrix(kind, 300, num_columns), num_rows, HALF, HALF, shape=_wgmma(block_t, block_n))
        check(random_matrix(kind, 70, num_columns), num_rows, HALF, HALF, True, _wgmma(block_t, block_n, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not triton_ops.has_wgmma(), reason="needs a GPU of Hopper's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_pair_kinds(kind: Kind, dtype: torch.dtype) -> None:
    matrix = random_matrix(kind, 150, 768)
    check(matrix, 130, dtype, dtype, has_bias=True, shape=PackedPairShape(128, 128, 2))
    check(matrix, 130, dtype, torch.float32, has_bias=True, shape=PackedPairShape(128, 256, 3, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not triton_ops.has_wgmma(), reason="needs a GPU of Hopper's")
@pytest.mark.parametrize(("block_t", "block_n"), [(256, 128), (128, 256), (128, 128)])
@pytest.mark.parametrize("num_rows", [65, 128, 200, 300])
def test_pair_rows(num_rows: int, block_t: int, block_n: int) -> None:
    for kind, num_columns in ((Kind(4, 32), 1120), (Kind(8, 32), 864), (Kind(4, 32), 128)):
        for splits, num_outputs in ((1, 304), (1, 70), (3, 300)):
            for stages, out_dtype in ((2, HALF), (2, torch.float32), (3, torch.float32)):
                shape = PackedPairShape(block_t, block_n, stages, splits)
                check(random_matrix(kind, num_outputs, num_columns), num_rows, HALF, out_dtype, True, shape)


def test_rows_that_cannot_be_copied_16_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = triton_ops.pack_matrix(random_matrix(KINDS[1], 9, 64))
    monkeypatch.setattr(triton_ops, "has_wgmma", lambda: True)
    for num_rows, special in ((5, PackedWgmmaShape), (65, PackedPairShape)):
        for is_aligned, kind in ((True, special), (False, PackedTileShape)):
            assert type(triton_ops.packed_shape(num_rows, matrix, torch.bfloat16, is_aligned)) is kind
    assert type(triton_ops.packed_shape(5, matrix, torch.float32)) is PackedTileShape


LINEARS = {"qkv": (6144, 512), "out": (4096, 512), "gate_up": (28672, 512), "down": (4096, 1792)}
"""Outputs, words of 4-bit weights a row."""


def test_splits_on_hopper_stay_within_one_wave() -> None:
    for num_rows in (2, 16, 32, 64, 65, 128, 129, 256):
        for num_outputs, num_words in (*LINEARS.values(), (128256, 512)):
            choose = wgmma_shape if num_rows <= 64 else pair_shape
            shape = choose(num_rows, num_outputs, num_words, 128, 8)
            tiles = -(-num_outputs // shape.block_n) * -(-num_rows // shape.block_t)
            stage_bytes = shape.block_n * (64 + 8) + shape.block_t * 256
            resident = (228 << 10) // (shape.num_stages * stage_bytes + 1024)
            assert resident and (shape.num_splits == 1 or tiles * shape.num_splits <= resident * 132)


@pytest.mark.parametrize(
    ("num_rows", "name", "tile"),
    [
        (128, "qkv", (128, 128, 5, 2)),
        (128, "out", (128, 128, 5, 4)),
        (128, "gate_up", (128, 256, 4, 1)),
        (128, "down", (128, 128, 5, 4)),
        (256, "qkv", (128, 128, 5, 1)),
        (256, "out", (128, 128, 5, 2)),
        (256, "gate_up", (256, 128, 3, 1)),
        (256, "down", (256, 128, 3, 4)),
    ],
)
def test_many_rows_on_hopper_take_the_tiles_that_were_fastest(num_rows: int, name: str, tile: tuple) -> None:
    for count in (num_rows, num_rows // 2 + 1):
        assert pair_shape(count, *LINEARS[name], 128, 8) == PackedPairShape(*tile)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("out_bits", [16, 32])
@pytest.mark.parametrize("num_rows", [65, 128, 129, 256])
def test_outputs_pass_through_memory_that_holds_them(num_rows: int, out_bits: int, bits: int) -> None:
    """Half as many columns of x lie there for weights of 8 bits, and a head's outputs take 32."""
    for num_outputs in (4096, 128256):
        num_words, chunk = 4096 * bits // 32, 512 // bits
        shape = pair_shape(num_rows, num_outputs, num_words, chunk, 4)
        tile = (shape.block_t, shape.block_n, 16)
        config = PackedConfig(4096, bits, 4096, *tile, False, False, num_splits=shape.num_splits)
        halves = staged_halves(config, out_bits, shape.num_stages)
        x_bits = 16 * shape.num_stages * shape.block_t * chunk
        assert halves in (0, x_bits / (shape.block_t * shape.block_n // 2 * out_bits))
        assert halves != 1 and (halves > 0 or out_bits == 32 or shape.num_splits > 1)
