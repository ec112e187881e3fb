"""linear against float64, over all the ways that it takes."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference.linear import linear, pack_table, pack_weight
from headrace.kernels.reference.onednn_weight import OneDNNWeight

ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def inputs(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 40, generator=generator)
    weight = torch.randn(24, 40, generator=generator) * 40**-0.5
    return x.to(dtype), weight.to(dtype), torch.randn(24, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 8, 13, 128, 129])
def test_linear(num_rows: int, is_transposed: bool, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = inputs(num_rows, dtype)
    if is_transposed:
        weight = weight.t().contiguous().t()
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    out = torch.full((num_rows, 24), torch.nan, dtype=dtype)
    linear(x, weight, bias if has_bias else None, out)
    assert ((out.double() - exact).abs() <= ERROR[dtype] * (1 + exact.abs())).all()


@pytest.mark.parametrize("num_rows", [1, 6, 200])
def test_other_columns_are_left_alone(num_rows: int) -> None:
    x, weight, bias = inputs(num_rows, torch.float32)
    out, alone = torch.full((num_rows, 30), 7.0), torch.empty(num_rows, 24)
    linear(x, weight, bias, alone)
    linear(x, weight, bias, out, 4)
    torch.testing.assert_close(out[:, 4:28], alone, rtol=1e-6, atol=1e-6)
    assert (out[:, :4] == 7.0).all() and (out[:, 28:] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_outputs_may_be_fp32(num_rows: int, dtype: torch.dtype) -> None:
    x, weight, _ = inputs(num_rows, dtype)
    out = torch.empty(num_rows, 24)
    linear(x, weight, None, out)
    exact = x.double() @ weight.double().T
    assert ((out.double() - exact).abs() <= ERROR[dtype] * (1 + exact.abs())).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 6, 130])
def test_weights_in_blocks(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = torch.randn(num_rows, 8, generator=generator), torch.randn(13_000, 8, generator=generator)
    bias = torch.randn(13_000, generator=generator) if has_bias else None
    packed = pack_weight(weight)
    assert isinstance(packed, torch.Tensor) and packed.shape == (4, 3250, 8)
    out = torch.full((num_rows, 13_003), torch.nan)
    linear(x, packed, bias, out, 2)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(out[:, 2:13_002].double(), exact, rtol=1e-5, atol=1e-5)
    assert out[:, [0, 1, 13_002]].isnan().all()


PRIME = 13_001
"""Has no blocks."""


@pytest.mark.parametrize(
    ("shape", "dtype", "strides"),
    [
        ((64, 32), torch.float32, (1, 64)),
        ((32, 64), torch.float32, (64, 1)),
        ((49_152, 4), torch.float32, (4096 * 4, 1, 4096)),
        ((PRIME, 4), torch.float32, (4, 1)),
        ((64, 32), torch.bfloat16, (32, 1)),
    ],
)
def test_packed_tables_hold_the_same_numbers(
    shape: tuple[int, int], dtype: torch.dtype, strides: tuple[int, ...]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = pack_table(weight)
    assert packed.stride() == strides and packed.dtype == dtype
    assert torch.equal(packed.reshape(shape), weight)
    if len(strides) == 2 and strides[1] == 1:
        assert packed is weight


@pytest.mark.parametrize("dtype", ERROR)
def test_weights_go_to_onednn_where_it_has_kernels(dtype: torch.dtype) -> None:
    weight = inputs(1, dtype)[1]
    is_packed = isinstance(pack_weight(weight), OneDNNWeight)
    assert is_packed == OneDNNWeight.is_supported(weight)
    assert not (is_packed and dtype == torch.float32)
