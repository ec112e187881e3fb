"""Rounding weights to integers: how close they stay, and the ends of ranges."""

from __future__ import annotations

import gguf
import gguf.quants
import pytest
import torch

from headrace.kernels.affine_matrix import AffineMatrix
from headrace.quant.precision import Rounding
from headrace.quant.rounding import as_scales, exact_scales, round_weights

WEIGHTS = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) * 0.02


def relative_error(matrix: AffineMatrix, weights: torch.Tensor = WEIGHTS) -> float:
    return float((matrix.dequantize() - weights).norm() / weights.norm())


@pytest.mark.parametrize(
    ("rounding", "bound"),
    [
        (Rounding(8, None), 0.0075),
        (Rounding(8, 32), 0.0055),
        (Rounding(8, 64, True), 0.006),
        (Rounding(4, 32), 0.085),
        (Rounding(4, 32, True), 0.08),
        (Rounding(4, 64, True), 0.095),
        (Rounding(4, 128), 0.115),
        (Rounding(4, None, True), 0.125),
    ],
    ids=str,
)
def test_error_of_normal_weights(rounding: Rounding, bound: float) -> None:
    matrix = round_weights(WEIGHTS, rounding)
    assert matrix.bits == rounding.bits and matrix.group_columns == (rounding.group_columns or 256)
    assert (matrix.minimums is not None) == rounding.has_zero_points
    assert 0.6 * bound < relative_error(matrix) < bound


@pytest.mark.parametrize("rounding", [Rounding(4, 32), Rounding(4, 32, True)], ids=str)
def test_the_search_beats_the_whole_range(rounding: Rounding) -> None:
    found = round_weights(WEIGHTS, rounding)
    groups = WEIGHTS.view(40, -1, 32)
    if rounding.has_zero_points:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (high - low) / 15
        plain = ((groups - low) / step).round() * step + low
    else:
        step = groups.abs().amax(-1, keepdim=True) / 7
        plain = (groups / step).round() * step
    assert relative_error(found) < 0.98 * float((plain.view_as(WEIGHTS) - WEIGHTS).norm() / WEIGHTS.norm())


@pytest.mark.parametrize(
    ("rounding", "block_type", "share"),
    [
        (Rounding(4, 32), "Q4_0", 0.97),
        (Rounding(4, 32, True), "Q4_1", 0.94),
        (Rounding(8, 32), "Q8_0", 1.001),
    ],
    ids=str,
)
@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_rounding_is_no_worse_than_llama_cpps(
    rounding: Rounding, block_type: str, share: float, tails: str
) -> None:
    """The same bytes a group, from the quantizers of the gguf package."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(200, 512, generator=generator) * 0.02
    if tails == "heavy":
        weights /= torch.rand(weights.shape, generator=generator).clamp_min(0.05).sqrt()
    kind = gguf.GGMLQuantizationType[block_type]
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weights.numpy(), kind), kind))
    their_error = float((theirs - weights).norm() / weights.norm())
    assert relative_error(round_weights(weights, rounding), weights) < share * their_error


@pytest.mark.parametrize("rounding", [Rounding(4, 32), Rounding(4, 32, True), Rounding(8, 32, True)], ids=str)
def test_a_group_with_fewer_columns_at_the_end(rounding: Rounding) -> None:
    weights = WEIGHTS[:, :80].clone()
    matrix = round_weights(weights, rounding)
    assert matrix.codes.shape == (40, 80) and matrix.scales.widen().shape == (40, 3)
    assert relative_error(matrix, weights) < 0.085


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_constant_groups_are_exact(bits: int, zero_points: bool) -> None:
    weights = torch.zeros(2, 64)
    weights[1] = 0.5
    matrix = round_weights(weights, Rounding(bits, 32, zero_points))
    torch.testing.assert_close(matrix.dequantize(), weights, rtol=1e-3, atol=0.0)
    assert (matrix.dequantize()[0] == 0.0).all()


def test_tiny_and_huge_weights_keep_their_scales() -> None:
    for size in (1e-8, 1e8):
        matrix = round_weights(WEIGHTS * size, Rounding(4, 32, True))
        assert matrix.scales.values.dtype == torch.float32
        assert relative_error(matrix, WEIGHTS * size) < 0.08


def test_scales_are_fp16_where_that_is_close_enough() -> None:
    assert as_scales(torch.tensor([0.1, 0.003])).values.dtype == torch.float16
    assert as_scales(torch.tensor([0.1, 1e5])).values.dtype == torch.float32
    assert exact_scales(torch.tensor([0.125, 3.0])).values.dtype == torch.float16
    assert exact_scales(torch.tensor([0.1])).values.dtype == torch.float32
