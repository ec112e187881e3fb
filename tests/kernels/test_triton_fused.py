"""Fused ops against the reference ops that they stand for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.reference.activation import gated_act
from headrace.kernels.reference.linear import linear
from headrace.kernels.reference.norm import rms_norm
from headrace.kernels.triton.fused import can_fuse, gated_linear, linear_add, norm_gated_linear, norm_linear
from tests.kernels.triton_setup import DEVICE, HALF, max_error, relative_error

EPS = 1e-5


def tensors(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    shapes = [(1, num_inputs), (num_outputs, num_inputs), (num_outputs,)]
    x, weight, bias = (torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes)
    norm = torch.rand(num_inputs, generator=generator, device=DEVICE) + 0.5
    return [x.to(dtype), (weight * num_inputs**-0.5).to(dtype), bias.to(dtype), norm]


def check_linear_add(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias, _ = tensors(*shape, dtype)
    residual = torch.randn(1, shape[0], device=DEVICE).to(dtype)
    product = torch.empty_like(residual)
    linear(x, weight, bias, product)
    expected = residual + product
    linear_add(x, weight, bias, residual)
    assert relative_error(residual, expected) < max_error(dtype)


def check_gated(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    x, weight, bias, norm = tensors(*shape, dtype)
    gate_up = torch.empty(1, shape[0], dtype=dtype, device=DEVICE)
    outs = [torch.empty(1, shape[0] // 2, dtype=dtype, device=DEVICE) for _ in range(2)]
    linear(x, weight, bias, gate_up)
    gated_act(gate_up, kind, outs[0])
    gated_linear(x, weight, bias, kind, outs[1])
    assert relative_error(outs[1], outs[0]) < 2 * max_error(dtype)
    normed = torch.empty_like(x)
    rms_norm(x, norm, EPS, normed)
    linear(normed, weight, None, gate_up)
    gated_act(gate_up, kind, outs[0])
    norm_gated_linear(x, norm, EPS, weight, None, kind, outs[1])
    assert relative_error(outs[1], outs[0]) < 2 * max_error(dtype)


def check_norm_linear(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias, norm = tensors(*shape, dtype)
    x *= 7
    normed = torch.empty_like(x)
    rms_norm(x, norm, EPS, normed)
    outs = [torch.zeros(1, shape[0] + 3, dtype=dtype, device=DEVICE) for _ in range(2)]
    linear(normed, weight, bias, outs[0], 3)
    norm_linear(x, norm, EPS, weight, bias, outs[1], 3)
    assert relative_error(outs[1], outs[0]) < max_error(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(50, 96), (8, 1104)], ids=str)
def test_fused_ops(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_linear_add(shape, dtype)
    check_norm_linear(shape, dtype)
    for kind in ("silu", "gelu_tanh"):
        check_gated(shape, dtype, kind)


def test_what_can_be_fused() -> None:
    weight = torch.empty(16, 64, dtype=HALF)
    assert can_fuse(weight) and can_fuse(weight.float())
    assert not can_fuse(torch.empty(16, 30, dtype=HALF))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 14336), (28672, 4096), (6144, 1024)], ids=str)
def test_large(shape: tuple[int, int]) -> None:
    check_norm_linear(shape, torch.bfloat16)
    check_linear_add(shape, torch.bfloat16)
    check_gated(shape, torch.bfloat16, "silu")
