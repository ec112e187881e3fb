"""Linear layers: shards, methods, and what each rank reads and computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from headrace.errors import CheckpointError, ConfigError
from headrace.layers import linear as linear_module
from headrace.layers.linear import ColumnParallelLinear, Linear, QKVParallelLinear, RowParallelLinear
from headrace.parallel.state import ParallelState
from headrace.quant.base import LoadedLinear, QuantMethod, Shard, WeightHome
from headrace.quant.unquantized import UNQUANTIZED
from tests.layers.dict_weights import DictWeights, context, random_tensors
from tests.parallel.thread_group import run_ranks

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 12, 4, 2, 3, 10
SHAPES: dict[str, tuple[int, ...]] = {
    "a.q_proj.weight": (HEADS * DIM, HIDDEN),
    "a.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
    "a.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
    "a.q_proj.bias": (HEADS * DIM,),
    "a.k_proj.bias": (KV_HEADS * DIM,),
    "a.v_proj.bias": (KV_HEADS * DIM,),
    "a.o_proj.weight": (HIDDEN, HEADS * DIM),
    "a.o_proj.bias": (HIDDEN,),
    "m.gate_proj.weight": (INNER, HIDDEN),
    "m.up_proj.weight": (INNER, HIDDEN),
}


def apply(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), layer.num_outputs), torch.nan)
    layer(x, out)
    return out


def product(tensors: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(()))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))


def qkv(weights: DictWeights, parallel: ParallelState | None = None) -> QKVParallelLinear:
    return QKVParallelLinear(context(weights, parallel), "a", HIDDEN, HEADS, KV_HEADS, DIM, has_bias=True)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_qkv_is_cut_by_heads(size: int, x: torch.Tensor) -> None:
    """Each rank has its query heads, then its key heads, then its value heads; and reads nothing else."""
    tensors = random_tensors(SHAPES)
    whole = [product(tensors, f"a.{part}_proj", x).view(5, -1, DIM) for part in "qkv"]
    for rank in range(size):
        weights = DictWeights(tensors)
        got = apply(qkv(weights, ParallelState(rank, size)), x).view(5, -1, DIM)
        mine, kv = slice(rank * HEADS // size, (rank + 1) * HEADS // size), rank * KV_HEADS // size
        kv_mine = slice(kv, kv + max(1, KV_HEADS // size))
        expected = torch.cat((whole[0][:, mine], whole[1][:, kv_mine], whole[2][:, kv_mine]), dim=1)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        rows = sum(shape[0] for name, shape in weights.read if name.endswith("weight"))
        assert rows == expected.shape[1] * DIM


@pytest.mark.parametrize("size", [1, 2])
def test_merged_columns_are_each_cut(size: int, x: torch.Tensor) -> None:
    tensors = random_tensors(SHAPES)
    gate, up = product(tensors, "m.gate_proj", x), product(tensors, "m.up_proj", x)
    for rank in range(size):
        layer = ColumnParallelLinear(
            context(DictWeights(tensors), ParallelState(rank, size)),
            ["m.gate_proj", "m.up_proj"],
            HIDDEN,
            [INNER, INNER],
            has_bias=False,
        )
        part = slice(rank * INNER // size, (rank + 1) * INNER // size)
        expected = torch.cat((gate[:, part], up[:, part]), dim=1)
        torch.testing.assert_close(apply(layer, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_results_are_summed_and_the_bias_added_once(size: int) -> None:
    tensors = random_tensors(SHAPES)
    x = torch.randn(5, HEADS * DIM, generator=torch.Generator().manual_seed(9))
    expected = product(tensors, "a.o_proj", x)

    def work(parallel: ParallelState) -> tuple[torch.Tensor, list[tuple[str, tuple[int, ...]]]]:
        weights = DictWeights(tensors)
        layer = RowParallelLinear(context(weights, parallel), "a.o_proj", HEADS * DIM, HIDDEN, has_bias=True)
        return apply(layer, x[:, parallel.share(HEADS * DIM, "columns")].contiguous()), weights.read

    for rank, (got, read) in enumerate(run_ranks(size, work)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        bias = [("a.o_proj.bias", (HIDDEN,))] if rank == 0 else []
        assert read == [("a.o_proj.weight", (HIDDEN, HEADS * DIM // size)), *bias]


def test_too_many_ranks_are_refused() -> None:
    weights = DictWeights(random_tensors(SHAPES))
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide 4 attention heads"):
        qkv(weights, ParallelState(0, 3))


class Doubled(QuantMethod):
    form = "doubled"

    """A method of its own kind: the stored matrix counts twice."""

    def load(self, shards: Sequence[Shard], home: WeightHome) -> LoadedLinear:
        loaded = UNQUANTIZED.load(shards, home)
        loaded.weight.mul_(2.0)
        return loaded

    def read_dense(self, shard: Shard, home: WeightHome) -> torch.Tensor:
        return 2.0 * UNQUANTIZED.read_dense(shard, home)


def test_shards_with_methods_of_their_own(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours with one method become one part; each writes its own columns."""
    doubled = Doubled()

    def select(home: WeightHome, name: str) -> QuantMethod:
        return doubled if name == "a.k_proj" else UNQUANTIZED

    monkeypatch.setattr(linear_module, "select_method", select)
    tensors = random_tensors(SHAPES)
    zero_bias = {name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in tensors.items()}
    layer = qkv(DictWeights(zero_bias))
    assert len(layer._parts) == 3
    q, k, v = (product(zero_bias, f"a.{part}_proj", x) for part in "qkv")
    torch.testing.assert_close(apply(layer, x), torch.cat((q, 2 * k, v), dim=1), rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    assert len(qkv(DictWeights(zero_bias))._parts) == 1


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("a.k_proj.weight", None, "'a.k_proj.weight' is missing"),
        ("a.v_proj.bias", None, "'a.v_proj.bias' is missing"),
        ("a.q_proj.weight", (12, 13), r"'a.q_proj.weight' has shape \[12, 13\], but .* \[12, 12\]"),
        ("a.k_proj.bias", (7,), r"'a.k_proj.bias' has shape \[7\], but .* \[6\]"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(
    name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    shapes = {key: value for key, value in SHAPES.items() if key != name}
    if shape is not None:
        shapes[name] = shape
    with pytest.raises(CheckpointError, match=message):
        qkv(DictWeights(random_tensors(shapes)))
