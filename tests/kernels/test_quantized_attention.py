"""Attention of the reference over quantized caches: the same as over what the codes mean."""

from __future__ import annotations

import pytest
import torch

from headrace.attention.base import AttentionShape, create_backend
from headrace.kernels.quantized_cache import KV_FORMATS
from headrace.kernels.reference.attention import attention
from tests.kernels.paged_step import make_step, quantized

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_mixed_step(name: str, window: int | None) -> None:
    step = make_step([1, 1, 40, 7], [1, 70, 40, 90], SHAPE, "cpu", torch.float32, window=window)
    meant, keys, values = quantized(step, name)
    out = torch.full((len(step.qkv), 64), torch.nan)
    plan = create_backend("reference", SHAPE, torch.device("cpu")).plan(step.metadata)
    for _ in range(2):  # the second layer finds the blocks sorted out
        attention(step.qkv, keys, values, plan, out, 4, 2, 16, step.scale, step.soft_cap)
        torch.testing.assert_close(out.double(), meant.oracle(), rtol=1e-5, atol=1e-5)
