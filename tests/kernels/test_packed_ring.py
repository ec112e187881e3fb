"""The four products of a layer over packed weights in the ring, each with an x of its own, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.kernels.triton.decode_stack import offset_between
from headrace.kernels.triton.decode_stack_config import StackConfig
from headrace.kernels.triton.digits_of_row import make_row, stage_row
from headrace.kernels.triton.gluon_names import barrier
from headrace.kernels.triton.packed_copies import copy_tiles, make_packed_ring
from headrace.kernels.triton.packed_ring import packed_product
from headrace.kernels.triton.packed_ring_config import COPY_REGISTERS, COPY_WARPS, packed_ring_config
from headrace.kernels.triton.stack_places import NUM_PLACES
from headrace.kernels.triton.word_matrix import WordMatrix

_COPY_WARPS, _COPY_REGISTERS = gl.constexpr(COPY_WARPS), gl.constexpr(COPY_REGISTERS)
NUM_PROGRAMS = 100


@gluon.jit
def _multiply(ring, row, x_ptr, out_ptr, C: gl.constexpr, R: gl.constexpr):
    slot = gl.program_id(0) * 0
    phase = slot
    for part in gl.static_range(4):
        stage_row(row, x_ptr + part * 16384, part, R)
        outs = (out_ptr + part * 16384,)
        slot, phase = packed_product((ring, row), slot, phase, 0.5, outs, part, 1, C, R)
        barrier()


@gluon.jit
def _products(x_ptr, weights_ptr, places_ptr, out_ptr, C: gl.constexpr, R: gl.constexpr):
    ring, row = make_packed_ring(R), make_row(R)
    gl.warp_specialize(
        [(_multiply, (ring, row, x_ptr, out_ptr, C, R)), (copy_tiles, (ring, weights_ptr, places_ptr, C, R))],
        [_COPY_WARPS],
        [_COPY_REGISTERS],
    )


def _weights(matrix: WordMatrix) -> torch.Tensor:
    """[n, k] float64."""
    words = matrix.codes.view(matrix.num_rows, -1, 1, 16)
    places = words >> (4 * torch.arange(8, device=words.device)).view(1, 1, 8, 1) & 15
    codes = places.reshape(matrix.num_rows, -1)[:, : matrix.num_columns].double()

    def spread(scales: torch.Tensor) -> torch.Tensor:
        columns = scales[:, : matrix.num_rows].T.double().repeat_interleave(matrix.group_columns, dim=1)
        return columns[:, : matrix.num_columns]

    if matrix.minimums is None:
        return (codes - 8) * spread(matrix.scales)
    return codes * spread(matrix.scales) + spread(matrix.minimums)


def _matrix(rows: int, columns: int, group: int, has_minimums: bool, kind: torch.dtype) -> WordMatrix:
    made = WordMatrix.empty((rows, columns), 4, group, has_minimums, kind, torch.device("cuda"))
    made.codes.random_(-(2**31), 2**31 - 1)
    made.scales.uniform_(0.5, 1.5).mul_(columns**-0.5 / 4)
    if made.minimums is not None:
        made.minimums.copy_(made.scales.float() * -7.3)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
@pytest.mark.parametrize(("group", "has_minimums"), [(32, False), (32, True), (128, False), (1 << 20, True)])
@pytest.mark.parametrize(("hidden", "inner", "queries"), [(4096, 14336, 6144), (1024, 3072, 4096)])
def test_products(
    hidden: int, inner: int, queries: int, group: int, has_minimums: bool, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs = (hidden, hidden if hidden > 1024 else 2048, hidden, inner)
    outputs = (queries, hidden, inner, hidden)
    matrices = [
        _matrix(2 * n if part == 2 else n, k, group, has_minimums, kind)
        for part, (n, k) in enumerate(zip(outputs, inputs, strict=True))
    ]
    config = packed_ring_config(matrices, outputs, inputs, NUM_PROGRAMS, 210 << 10)
    assert config is not None
    places = torch.zeros((1, NUM_PLACES), dtype=torch.int64, device="cuda")
    for part, matrix in enumerate(matrices):
        offset = offset_between(matrices[0].codes, matrix.codes)
        assert offset is not None
        places[0, part] = offset
    x = torch.randn(4, 16384, device="cuda", dtype=torch.bfloat16)
    x *= torch.rand(4, 16384, device="cuda").exp2() ** 8
    out = torch.full((4, 16384), torch.nan, device="cuda", dtype=torch.bfloat16)
    stack = StackConfig(1, hidden, 1, 1, 64, 16, True, False, False, 16, 64, 1)
    _products[(NUM_PROGRAMS,)](x, matrices[0].codes, places, out, stack, config, num_warps=8)
    for part, matrix in enumerate(matrices):
        expected = _weights(matrix) @ x[part, : inputs[part]].double() * 0.5
        if part == 2:
            gate, up = expected.to(torch.bfloat16).double().view(2, -1)
            expected = torch.nn.functional.silu(gate) * up
        found = out[part, : outputs[part]].double()
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < 1e-2, (part, error, found[:8], expected[:8])
