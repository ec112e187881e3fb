"""Shards of packed matrices: stacked, cut over ranks, multiplied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.checkpoint.gguf_types import GGMLType
from headrace.errors import ConfigError
from headrace.kernels.registry import Ops
from headrace.layers.context import LayerContext
from headrace.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from headrace.layers.linear import ColumnParallelLinear, RowParallelLinear
from headrace.loader.base import PackedBlocks
from headrace.loader.weight_data import WeightData
from headrace.parallel.state import ParallelState
from headrace.quant.precision import Precision
from tests.kernels.native.conftest import instruction_sets
from tests.layers.dict_weights import CPU, context
from tests.loader.test_ggml_affine import random_blocks
from tests.parallel.thread_group import run_ranks
from tests.quant.packed_weights import BlockWeights, FastReferenceOps

N, K = 12, 128
BLOCKS = {
    "a.weight": random_blocks(GGMLType.Q4_1, N, K),
    "b.weight": random_blocks(GGMLType.Q8_0, N, K),
    "c.weight": random_blocks(GGMLType.Q8_0, N, K),
    "k.weight": random_blocks(GGMLType.Q4_K, N, 2 * 256),
}
BIAS = {"b.bias": torch.arange(float(N))}
GGUF = {"quant_method": "gguf"}


def dense(name: str) -> torch.Tensor:
    blocks: PackedBlocks = BLOCKS[f"{name}.weight"]
    return WeightData(name, "memory", packed=blocks).dequantize(torch.float32)


def layers(
    parallel: ParallelState | None = None, inputs: str = "float", kernels: str = "reference"
) -> LayerContext:
    ctx = context(BlockWeights(BIAS, BLOCKS), parallel)
    ops = Ops.for_device(CPU, kernels, ctx.parallel.communicator)
    if kernels == "reference":
        ops = FastReferenceOps(ops.table)
    return replace(ctx, ops=ops, quantization=GGUF, precision=Precision.parse("auto", None, inputs))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, K, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("kernels", ["reference", *(["native"] if instruction_sets() != ["none"] else [])])
def test_shards_of_one_type_are_one_part(x: torch.Tensor, kernels: str) -> None:
    ctx = layers(kernels=kernels)
    layer = ColumnParallelLinear(ctx, ["a", "b", "c"], K, [N, N, N], has_bias=False)
    assert [type(part).__name__ for part, _ in layer._parts] == ["PackedLinear"] * 2
    out = torch.full((3, 3 * N), torch.nan)
    layer(x, out)
    expected = x @ torch.cat([dense(name) for name in "abc"]).T
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def test_biases_are_added(x: torch.Tensor) -> None:
    layer = RowParallelLinear(layers(), "b", K, N, has_bias=True)
    out = torch.full((3, N), torch.nan)
    layer(x, out)
    torch.testing.assert_close(out, x @ dense("b").T + BIAS["b.bias"], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_whole_groups(x: torch.Tensor, size: int) -> None:
    def work(parallel: ParallelState) -> torch.Tensor:
        layer = RowParallelLinear(layers(parallel), "a", K, N, has_bias=False)
        out = torch.empty(3, N)
        layer(x[:, parallel.share(K, "columns")].contiguous(), out)
        return out

    for out in run_ranks(size, work):
        torch.testing.assert_close(out, x @ dense("a").T, rtol=1e-4, atol=1e-3)


def test_ranks_that_would_cut_groups_are_refused() -> None:
    def work(parallel: ParallelState) -> None:
        with pytest.raises(ConfigError, match=r"size 8 cuts the 128 columns .* possible sizes: 1, 2, 4"):
            RowParallelLinear(layers(parallel), "a", K, N, has_bias=False)
        with pytest.raises(
            ConfigError, match=r"512 columns of 'k' inside a group of 256.* possible sizes: 1, 2"
        ):
            RowParallelLinear(layers(parallel), "k", 512, N, has_bias=False)

    run_ranks(8, work)


@pytest.mark.parametrize("size", [1, 2])
def test_a_packed_table_is_embedding_and_head(x: torch.Tensor, size: int) -> None:
    table, ids = dense("b"), torch.tensor([0, 11, 5])

    def work(parallel: ParallelState) -> None:
        ctx = layers(parallel)
        embedding = VocabParallelEmbedding(ctx, "b", N, K, 2.0)
        out = torch.empty(3, K)
        embedding(ids, out)
        assert torch.equal(out, 2.0 * table[ids])
        head = ParallelLMHead(ctx, "head", N, K, embedding)
        assert head._matrix.matrix is embedding.matrix
        logits = head(x, torch.tensor([2, 0])).whole()
        torch.testing.assert_close(logits, x[[2, 0]] @ table.T, rtol=1e-4, atol=1e-3)

    run_ranks(size, work)


def test_inputs_may_be_rounded(x: torch.Tensor) -> None:
    out, plain = torch.empty(3, N), torch.empty(3, N)
    RowParallelLinear(layers(inputs="int8"), "a", K, N, has_bias=False)(x, out)
    RowParallelLinear(layers(), "a", K, N, has_bias=False)(x, plain)
    assert 1e-4 < (out - plain).norm() / plain.norm() < 1e-2
