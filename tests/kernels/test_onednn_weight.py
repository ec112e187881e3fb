"""Weights in oneDNN's order against float64; on processors without its kernels, that none is made."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference import onednn_weight
from headrace.kernels.reference.linear import linear, pack_weight
from headrace.kernels.reference.onednn_weight import OneDNNWeight

ERROR = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
SHAPES = [(24, 40), (1, 8), (7, 3), (130, 64)]


def weight_of(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    if not OneDNNWeight.is_supported(weight):
        pytest.skip("oneDNN has no kernels for the type on this processor")
    return weight


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 33, 200])
def test_products(num_rows: int, has_bias: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Into columns of a wider buffer of either type, which are all that changes."""
    weight = weight_of(shape, dtype)
    x, bias = torch.randn(num_rows, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    for out_dtype in (dtype, torch.float32):
        out = torch.full((num_rows, shape[0] + 5), 7.0, dtype=out_dtype)
        linear(x, OneDNNWeight(weight), bias if has_bias else None, out, 3)
        product = out[:, 3 : 3 + shape[0]].double()
        assert ((product - exact).abs() <= ERROR[dtype] * (1 + exact.abs())).all()
        assert (out[:, :3] == 7.0).all() and (out[:, 3 + shape[0] :] == 7.0).all()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_holds_the_same_numbers(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weight_of(shape, dtype)
    packed = OneDNNWeight(weight)
    assert packed.shape == shape and packed.dtype == dtype
    assert torch.equal(packed.dense(), weight)


def test_the_weight_it_was_made_from_is_not_kept() -> None:
    """Else a model would take its size twice."""
    weight = weight_of((64, 64), torch.bfloat16)
    packed, x = OneDNNWeight(weight), torch.ones(2, 64, dtype=torch.bfloat16)
    before = packed.multiply(x, None)
    weight.zero_()
    assert torch.equal(packed.multiply(x, None), before) and before.any()


def test_without_kernels_weights_stay_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors without AVX-512."""
    monkeypatch.setattr(onednn_weight, "_supported_types", frozenset)
    weight = torch.randn(24, 40).bfloat16()
    assert pack_weight(weight) is weight


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_empty_weights_stay_tensors(shape: tuple[int, int]) -> None:
    assert not OneDNNWeight.is_supported(torch.empty(shape, dtype=torch.bfloat16))
