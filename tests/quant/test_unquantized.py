"""Dense shards: one below the other, biases where there are any, whatever the stored type."""

from __future__ import annotations

import torch

from headrace.kernels.reference.onednn_weight import OneDNNWeight
from headrace.quant.base import Shard, WeightHome
from headrace.quant.unquantized import UNQUANTIZED, DequantizedMethod, UnquantizedMethod
from tests.layers.dict_weights import DictWeights, context, random_tensors

TENSORS = random_tensors({"a.weight": (6, 4), "b.weight": (3, 4), "b.bias": (3,)})


def shard(name: str, rows: slice, columns: slice, has_bias: bool = False) -> Shard:
    return Shard(name, (len(TENSORS[f"{name}.weight"]), 4), rows, columns, has_bias)


def test_parts_of_shards_are_stacked_with_their_biases() -> None:
    home = context(DictWeights(TENSORS)).weight_home
    shards = [
        shard("a", slice(2, 5), slice(1, 3)),
        shard("b", slice(1, 3), slice(1, 3), has_bias=True),
    ]
    loaded = UNQUANTIZED.load(shards, home)
    expected = torch.cat((TENSORS["a.weight"][2:5, 1:3], TENSORS["b.weight"][1:3, 1:3]))
    assert torch.equal(loaded.weight, expected)
    assert loaded.bias is not None
    assert torch.equal(loaded.bias, torch.cat((torch.zeros(3), TENSORS["b.bias"][1:3])))


def test_the_compute_type_is_what_is_kept() -> None:
    home = context(DictWeights(TENSORS), dtype=torch.bfloat16).weight_home
    loaded = UNQUANTIZED.load([shard("a", slice(0, 6), slice(0, 4))], home)
    weight = loaded.weight.dense() if isinstance(loaded.weight, OneDNNWeight) else loaded.weight
    assert torch.equal(weight, TENSORS["a.weight"].bfloat16()) and loaded.bias is None


def test_loaded_weights_are_copies() -> None:
    """A source's tensors may be pages of a file."""
    loaded = UNQUANTIZED.load(
        [shard("a", slice(0, 6), slice(0, 4))], context(DictWeights(TENSORS)).weight_home
    )
    assert loaded.weight.data_ptr() != TENSORS["a.weight"].data_ptr()


def test_any_stored_form_can_be_kept_dense() -> None:
    class Halved(UnquantizedMethod):
        def read_dense(self, shard: Shard, home: WeightHome) -> torch.Tensor:
            return super().read_dense(shard, home) / 2

    home = context(DictWeights(TENSORS)).weight_home
    shards = [shard("a", slice(1, 4), slice(0, 4)), shard("b", slice(0, 3), slice(0, 4), has_bias=True)]
    loaded = DequantizedMethod(Halved()).load(shards, home)
    assert torch.equal(loaded.weight, torch.cat((TENSORS["a.weight"][1:4], TENSORS["b.weight"])) / 2)
    assert loaded.bias is not None and torch.equal(loaded.bias[3:], TENSORS["b.bias"])
