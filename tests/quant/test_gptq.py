"""GPTQ checkpoints against the formula of the format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.quant.gptq import GPTQMethod
from tests.quant.packed_weights import home, pack_words, read, shard

N, K = 24, 128


def checkpoint(
    bits: int, group: int, zeros: torch.Tensor | None, stored_offset: int, g_idx: torch.Tensor | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(tensors, the weights that they mean)."""
    generator = torch.Generator().manual_seed(bits)
    group = group if group > 0 else K
    num_groups = K // group
    codes = torch.randint(0, 1 << bits, (K, N), generator=generator)
    scales = (torch.rand(num_groups, N, generator=generator) * 0.01 + 0.001).half()
    if zeros is None:
        zeros = torch.full((num_groups, N), 1 << (bits - 1))
    group_of = torch.arange(K) // group if g_idx is None else g_idx
    weights = scales[group_of].float() * (codes - zeros[group_of]).float()
    tensors = {
        "m.qweight": pack_words(codes.t(), bits).t().contiguous(),
        "m.qzeros": pack_words((zeros - stored_offset) & ((1 << bits) - 1), bits),
        "m.scales": scales,
        "m.g_idx": group_of.int(),
    }
    return tensors, weights.t()


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group", [-1, 32, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_formula(bits: int, group: int, layout: str, is_symmetric: bool) -> None:
    config = {"bits": bits, "group_size": group, "checkpoint_format": layout}
    num_groups = K // (group if group > 0 else K)
    generator = torch.Generator().manual_seed(9)
    zeros = None if is_symmetric else torch.randint(1, (1 << bits) - 1, (num_groups, N), generator=generator)
    tensors, weights = checkpoint(bits, group, zeros, 1 if layout == "gptq" else 0)
    method, where = GPTQMethod.from_config(config), home(tensors)
    matrix = method.read(shard("m", (N, K)), where)
    torch.testing.assert_close(matrix.dequantize(), weights, rtol=1e-6, atol=1e-8)
    assert (matrix.minimums is None) == is_symmetric and matrix.bits == bits
    rows, columns = slice(8, 20), slice(64, 128)
    part = read(method, shard("m", (N, K), rows, columns), where)
    torch.testing.assert_close(part, weights[rows, columns], rtol=1e-6, atol=1e-8)


def test_a_part_inside_a_group_is_refused_with_the_sizes_that_work() -> None:
    tensors, _ = checkpoint(4, 64, None, 1)
    method = GPTQMethod.from_config({"bits": 4, "group_size": 64})
    with pytest.raises(ConfigError, match=r"size 4 cuts the 128 columns of 'm' .* group of 64.* sizes: 1, 2"):
        method.read(shard("m", (N, K), columns=slice(32, 64)), home(tensors))


def test_act_order_is_kept_in_8_bits() -> None:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(3))
    tensors, weights = checkpoint(4, 32, None, 1, g_idx=(order // 32))
    method = GPTQMethod.from_config({"bits": 4, "group_size": 32, "desc_act": True})
    matrix = method.read(shard("m", (N, K), columns=slice(32, 128)), home(tensors))
    assert matrix.bits == 8
    error = (matrix.dequantize() - weights[:, 32:]).norm() / weights[:, 32:].norm()
    assert error < 0.005


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 3}, "bits=3.*known: 4, 8"),
        ({"bits": 4, "checkpoint_format": "marlin"}, "'marlin'.*known: 'gptq'"),
    ],
)
def test_unknown_kinds(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        GPTQMethod.from_config(config)
