"""Triton linear against float64, over all the ways that it takes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.few_rows import FewRowsShape, few_rows_shape, takes_few_rows
from headrace.kernels.triton.linear import linear
from tests.kernels.triton_setup import DEVICE, HALF, max_error, relative_error


def check(
    rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    out_type: torch.dtype | None = None,
    col: int = 0,
) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    x = torch.randn(rows, num_inputs, generator=generator, device=DEVICE).to(dtype)
    weight = torch.randn(num_outputs, num_inputs, generator=generator, device=DEVICE).to(dtype)
    bias = torch.randn(num_outputs, generator=generator, device=DEVICE).to(dtype) * 8 if has_bias else None
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    out = torch.full((rows, num_outputs + 2 * col), 7.0, dtype=out_type or dtype, device=DEVICE)
    linear(x, weight, bias, out, col)
    if rows:
        got = out[:, col : col + num_outputs]
        summed = 1e-5 * max(1.0, num_inputs / 4096) ** 0.5  # of fp32 sums of that many products
        assert relative_error(got, exact) < max(max_error(out.dtype), summed * (dtype == HALF))
    assert (out[:, :col] == 7.0).all() and (out[:, col + num_outputs :] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 9])
def test_linear(rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    check(rows, 50, 96, dtype, has_bias=has_bias, col=5)


@pytest.mark.parametrize("rows", [1, 3])
def test_outputs_may_be_fp32(rows: int) -> None:
    check(rows, 20, 1600, HALF, out_type=torch.float32)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_are_not_aligned(rows: int) -> None:
    check(rows, 20, 37, HALF)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 14336), (28672, 4096), (1024, 3072), (960, 576)], ids=str
)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 24, 64, 100])
def test_large(rows: int, shape: tuple[int, int]) -> None:
    check(rows, *shape, torch.bfloat16, has_bias=True, col=64)
    check(rows, *shape, torch.bfloat16, out_type=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("rows", [2, 17, 48, 64])
@pytest.mark.parametrize("shape", [(5000, 4104), (3001, 1000), (28000, 520)], ids=str)
def test_few_rows_of_any_sizes(shape: tuple[int, int], rows: int, is_last: bool) -> None:
    """Tiles that reach beyond outputs and inputs; x in a larger matrix, with NaN around it or at the end of memory."""
    x = torch.full((rows if is_last else 200, shape[1] + 8), torch.nan, dtype=torch.float16, device=DEVICE)
    x = x[:rows, : shape[1]]
    x.normal_()
    weight = torch.randn(shape, device=DEVICE).half()
    out = torch.empty((rows, shape[0]), dtype=torch.float16, device=DEVICE)
    assert takes_few_rows(x, weight) and few_rows_shape(rows, *shape) is not None
    linear(x, weight, None, out)
    assert relative_error(out, x.double() @ weight.double().T) < max_error(out.dtype)


def test_shapes_fill_the_device() -> None:
    found = {
        (rows, sizes): few_rows_shape(rows, *sizes)
        for rows in (2, 33)
        for sizes in ((4096, 4096), (28672, 4096), (1024, 3072))
    }
    assert found[2, (4096, 4096)] == FewRowsShape(16, 32, 256)
    assert found[33, (28672, 4096)] == FewRowsShape(64, 128, 128)
    assert found[33, (1024, 3072)] == FewRowsShape(64, 16, 256)
    # shared memory of a program: rounds, and the sums on their way out
    for shape in found.values():
        assert shape is not None
        rounds = shape.num_stages * (64 + shape.block_n) * shape.block_k * 2
        assert shape.num_stages >= 3 and rounds + 64 * shape.block_n * 4 < 227 << 10


def test_too_few_outputs_and_too_many_rows_are_left_to_the_library() -> None:
    assert few_rows_shape(2, 960, 4096) is None and few_rows_shape(65, 4096, 4096) is None
