"""compressed-tensors checkpoints against the formula of the format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.quant.compressed_tensors import CompressedTensorsMethod
from tests.quant.packed_weights import home, pack_words, read, shard

N, K = 24, 128


def config(layout: str, bits: int, group: int | None, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group" if group else "channel",
        "group_size": group,
        "symmetric": symmetric,
    } | more
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"format": layout, "config_groups": groups, "ignore": ["lm_head", "re:.*gate$"]}


def checkpoint(
    layout: str, bits: int, group: int | None, symmetric: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(bits)
    half, num_groups = 1 << (bits - 1), K // (group or K)
    codes = torch.randint(-half, half, (N, K), generator=generator)
    zeros = torch.randint(-half, half, (N, num_groups), generator=generator)
    if symmetric:
        zeros.zero_()
    scales = (torch.rand(N, num_groups, generator=generator) * 0.01 + 0.001).bfloat16()
    group_of = torch.arange(K) // (group or K)
    weights = scales[:, group_of].float() * (codes - zeros[:, group_of]).float()
    tensors: dict[str, torch.Tensor] = {"m.weight_scale": scales}
    if layout == "pack-quantized":
        tensors["m.weight_packed"] = pack_words(codes + half, bits)
        tensors["m.weight_shape"] = torch.tensor([N, K])
        if not symmetric:
            tensors["m.weight_zero_point"] = pack_words((zeros + half).t(), bits).t().contiguous()
    else:
        tensors["m.weight"] = codes.to(torch.int8)
        if not symmetric:
            tensors["m.weight_zero_point"] = zeros.to(torch.int8)
    return tensors, weights


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [None, 32, 64])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
def test_the_formula(layout: str, bits: int, group: int | None, symmetric: bool) -> None:
    tensors, weights = checkpoint(layout, bits, group, symmetric)
    method = CompressedTensorsMethod.from_config(config(layout, bits, group, symmetric), "m")
    assert method is not None
    where = home(tensors)
    torch.testing.assert_close(read(method, shard("m", (N, K)), where), weights, rtol=1e-6, atol=1e-8)
    rows, columns = slice(6, 20), slice(64, 128)
    part = read(method, shard("m", (N, K), rows, columns), where)
    torch.testing.assert_close(part, weights[rows, columns], rtol=1e-6, atol=1e-8)


def test_a_packed_matrix_tells_its_shape() -> None:
    """Which is then no tensor that the model does not use."""
    tensors, _ = checkpoint("pack-quantized", 4, 32, True)
    method = CompressedTensorsMethod.from_config(config("pack-quantized", 4, 32, True), "m")
    assert method is not None
    where = home(tensors)
    read(method, shard("m", (N, K)), where)
    assert not where.weights.unused_names()
    tensors["m.weight_shape"] = torch.tensor([N, K + 1])
    with pytest.raises(
        UnsupportedModelError, match=rf"m.weight_shape' says \[{N}, {K + 1}\], but the model needs"
    ):
        read(method, shard("m", (N, K)), home(tensors))


def test_one_scale_for_the_whole_matrix() -> None:
    codes = torch.randint(-128, 128, (N, K), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    method = CompressedTensorsMethod.from_config(config("int-quantized", 8, None, strategy="tensor"), "m")
    assert method is not None
    where = home({"m.weight": codes, "m.weight_scale": torch.tensor([0.5])})
    assert torch.equal(read(method, shard("m", (N, K), slice(4, 9)), where), codes[4:9].float() * 0.5)


def test_ignored_modules_are_not_quantized() -> None:
    known = config("pack-quantized", 4, 32)
    for name in ("lm_head", "model.layers.0.mlp.gate", "model.embed_tokens"):
        assert CompressedTensorsMethod.from_config(known, name) is None
    assert CompressedTensorsMethod.from_config(known, "model.layers.0.mlp.gate_proj") is not None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (config("float-quantized", 8, None), "'float-quantized'.*known: 'pack-quantized', 'int-quantized'"),
        (config("pack-quantized", 4, 32, type="float"), "type='float'.*known: 'int'"),
        (config("pack-quantized", 3, 32), "num_bits=3.*known: 4, 8"),
        (config("pack-quantized", 4, 32, actorder="group"), "actorder='group'"),
    ],
)
def test_unknown_kinds(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        CompressedTensorsMethod.from_config(wrong, "m")


def test_a_part_inside_a_group_is_refused() -> None:
    tensors, _ = checkpoint("pack-quantized", 4, 64, True)
    method = CompressedTensorsMethod.from_config(config("pack-quantized", 4, 64), "m")
    assert method is not None
    with pytest.raises(ConfigError, match="possible sizes: 1, 2"):
        method.read(shard("m", (N, K), columns=slice(0, 32)), home(tensors))
