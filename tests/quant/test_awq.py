"""AWQ checkpoints against the formula of the format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.quant.awq import AWQMethod
from tests.quant.packed_weights import home, pack_words, read, shard

N, K = 24, 128
FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]
"""AutoAWQ packs outputs 0, 2, 4, 6, 1, 3, 5, 7 from the low bits up: output i is in field FIELDS[i]."""


def checkpoint(group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(group)
    num_groups = K // group
    codes = torch.randint(0, 16, (K, N), generator=generator)
    zeros = torch.randint(0, 16, (num_groups, N), generator=generator)
    scales = (torch.rand(num_groups, N, generator=generator) * 0.01 + 0.001).half()
    group_of = torch.arange(K) // group
    weights = scales[group_of].float() * (codes - zeros[group_of]).float()
    tensors = {
        "m.qweight": pack_words(codes, 4, FIELDS),
        "m.qzeros": pack_words(zeros, 4, FIELDS),
        "m.scales": scales,
    }
    return tensors, weights.t()


def test_the_order_is_autoawqs() -> None:
    assert [FIELDS.index(field) for field in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("group", [32, 64, K])
def test_the_formula(group: int) -> None:
    tensors, weights = checkpoint(group)
    method, where = AWQMethod.from_config({"bits": 4, "group_size": group, "version": "GEMM"}), home(tensors)
    torch.testing.assert_close(read(method, shard("m", (N, K)), where), weights, rtol=1e-6, atol=1e-8)
    if group < K:
        rows, columns = slice(8, 24), slice(64, 128)
        part = read(method, shard("m", (N, K), rows, columns), where)
        torch.testing.assert_close(part, weights[rows, columns], rtol=1e-6, atol=1e-8)


def test_parts_that_cut_groups_or_words_are_refused() -> None:
    tensors, _ = checkpoint(64)
    method, where = AWQMethod.from_config({"w_bit": 4, "q_group_size": 64}), home(tensors)
    with pytest.raises(ConfigError, match=r"inside a group of 64.*possible sizes: 1, 2$"):
        method.read(shard("m", (N, K), columns=slice(0, 32)), where)
    with pytest.raises(ConfigError, match="inside a word of 8; choose a size that divides 3"):
        method.read(shard("m", (N, K), rows=slice(0, 12)), where)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"bits": 8}, "bits=8.*known: 4"), ({"bits": 4, "version": "gemv"}, "'gemv'.*known: 'gemm'")],
)
def test_unknown_kinds(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        AWQMethod.from_config(config)
