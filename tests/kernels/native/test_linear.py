"""Native linear over packed weights against float64, for all types and for every way that it takes."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.native.linear import linear, pack_weight, weight_dtype
from tests.kernels.native.guarded import guarded, random_rows

TYPES = [torch.float32, torch.bfloat16, torch.float16]
ERROR = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


def check(
    rows: int,
    outputs: int,
    inputs: int,
    weight_type: torch.dtype,
    x_type: torch.dtype,
    out_type: torch.dtype,
    has_bias: bool = False,
) -> None:
    x = random_rows(rows, inputs, x_type, first=1 + rows % 3)
    weight = (random_rows(outputs, inputs, torch.float32, seed=1) * inputs**-0.5).to(weight_type)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2)).to(x_type) if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = guarded(rows, outputs + 4, out_type)
    linear(x, pack_weight(weight), bias, out.view, 3)
    found = out.view[:, 3 : outputs + 3].double()
    assert ((found - exact).abs() <= ERROR[out_type] * (1 + exact.abs())).all()
    out.view[:, 3 : outputs + 3] = 7.0
    assert (out.view == 7.0).all(), "other columns were written"
    out.check()


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 25, 31, 97, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (1, 1), (70, 33), (129, 7)])
def test_shapes(rows: int, outputs: int, inputs: int, weight_type: torch.dtype) -> None:
    check(rows, outputs, inputs, weight_type, torch.float32, torch.float32, has_bias=rows % 2 == 1)


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("out_type", TYPES)
@pytest.mark.parametrize("rows", [1, 30])
def test_types(rows: int, weight_type: torch.dtype, x_type: torch.dtype, out_type: torch.dtype) -> None:
    check(rows, 37, 50, weight_type, x_type, out_type, has_bias=True)


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("rows", [1, 30, 100])
def test_long_rows_are_summed_in_parts(rows: int, weight_type: torch.dtype) -> None:
    check(rows, 20, 1111, weight_type, torch.float32, torch.float32, has_bias=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 70])
@pytest.mark.parametrize("outputs", [16, 30, 48, 50])
@pytest.mark.parametrize("inputs", [32, 96, 100])
def test_bf16_by_bf16(rows: int, outputs: int, inputs: int) -> None:
    """Where there are tiles, these are their shapes."""
    for out_type in (torch.float32, torch.bfloat16):
        check(rows, outputs, inputs, torch.bfloat16, torch.bfloat16, out_type, has_bias=True)


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(50, 700), (150, 704)])
def test_a_row_is_bitwise_the_same_in_any_batch(
    outputs: int, inputs: int, x_type: torch.dtype, weight_type: torch.dtype
) -> None:
    weight = pack_weight(torch.randn(outputs, inputs).to(weight_type))
    x = torch.randn(150, inputs).to(x_type)
    together = torch.empty(150, outputs)
    linear(x, weight, None, together)
    for first, last in ((0, 1), (1, 3), (3, 8), (8, 40), (40, 150), (149, 150), (30, 32)):
        alone = torch.empty(last - first, outputs)
        linear(x[first:last], weight, None, alone)
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("dtype", TYPES)
def test_narrow_weights_give_what_wide_ones_give(dtype: torch.dtype) -> None:
    narrow = torch.randn(40, 90).to(dtype)
    for rows in (1, 5, 60):
        x, first, second = torch.randn(rows, 90), torch.empty(rows, 40), torch.empty(rows, 40)
        linear(x, pack_weight(narrow), None, first)
        linear(x, pack_weight(narrow.float()), None, second)
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(16, 8), (1, 1), (37, 41)])
def test_packing_keeps_the_numbers(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random_rows(*shape, dtype)
    packed = pack_weight(weight)
    assert packed.shape == shape and packed.dtype == dtype and torch.equal(packed.dense(), weight)


def test_weights_stay_in_the_narrower_type() -> None:
    assert weight_dtype(torch.bfloat16, torch.float32) == torch.bfloat16
    assert weight_dtype(torch.float16, torch.float32) == torch.float16
    assert weight_dtype(torch.float32, torch.bfloat16) == torch.bfloat16
    assert weight_dtype(torch.bfloat16, torch.float16) == torch.float16
    assert weight_dtype(torch.float64, torch.float32) == torch.float32


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 40)
    x[1, 7] = torch.nan
    out = torch.empty(3, 20)
    linear(x, pack_weight(torch.randn(20, 40)), None, out)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
