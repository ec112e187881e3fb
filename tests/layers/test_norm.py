"""RMSNorm: its weight is kept in fp32 whatever the compute type."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import CheckpointError
from headrace.layers.norm import RMSNorm
from tests.layers.dict_weights import DictWeights, context

WEIGHT = torch.tensor([1.0009765625, 2.0, 0.5, 1.0])


def test_norm_and_add() -> None:
    norm = RMSNorm(context(DictWeights({"n.weight": WEIGHT})), "n", 4, 1e-6)
    x, residual, out = torch.randn(3, 4), torch.randn(3, 4), torch.empty(3, 4)
    norm(x, out)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (4,), WEIGHT, 1e-6))
    total = residual + x
    norm.add(x, residual, x)
    assert torch.equal(residual, total)
    torch.testing.assert_close(x, torch.nn.functional.rms_norm(total, (4,), WEIGHT, 1e-6))


def test_weights_keep_bits_that_bf16_has_not() -> None:
    norm = RMSNorm(context(DictWeights({"n.weight": WEIGHT}), dtype=torch.bfloat16), "n", 4, 1e-6)
    assert norm._weight.dtype == torch.float32 and torch.equal(norm._weight, WEIGHT)


def test_a_misshapen_weight_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'n.weight' has shape \[4\], but .* \[5\]"):
        RMSNorm(context(DictWeights({"n.weight": WEIGHT})), "n", 5, 1e-6)
