from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as PackageType
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.checkpoint.gguf_types import GGMLType
from headrace.checkpoint.load import load_architecture
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.loader.base import WeightSource, open_weights
from headrace.loader.gguf import GGUFSource
from headrace.loader.tensor_names import expected_tensors, gguf_name, is_norm
from tests.checkpoint.gguf_writer import TensorSpec, gguf_bytes, tiny_llama
from tests.loader.checkpoints import (
    CONFIGS,
    SIZES,
    architecture,
    config,
    gguf_tensor_name,
    open_source,
    permute,
    random_tensors,
    read_all,
    write_folder,
    write_gguf,
)

QUERY = "model.layers.1.self_attn.q_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_comes_back_as_written(name: str, tmp_path: Path) -> None:
    arch = architecture(name)
    tensors = random_tensors(arch)
    weights = open_source(write_gguf(tmp_path / "m.gguf", arch, tensors))
    assert set(weights.names()) == set(tensors)
    for key, tensor in tensors.items():
        expected = tensor + 1 if name == "gemma3" and is_norm(key) else tensor
        assert torch.equal(weights.get(key, shape=tuple(tensor.shape)).dequantize(torch.float32), expected), (
            key
        )
    assert weights.unused_names() == []


@pytest.mark.parametrize("name", CONFIGS)
def test_names_agree_with_the_packages_table(name: str) -> None:
    arch = architecture(name, tie_word_embeddings=False)
    package_name = "llama" if name == "mistral" else name
    for hf_name in expected_tensors(arch):
        assert gguf_name(hf_name, arch) == gguf_tensor_name(package_name, hf_name)


def test_norm_sides_of_gemma_are_told_apart() -> None:
    """The package's table is checked by its use in converters; this is what llama.cpp's Gemma 3 graph reads."""
    gemma, llama = architecture("gemma3"), architecture("llama")
    assert (
        gguf_name("model.layers.3.post_attention_layernorm.weight", gemma)
        == "blk.3.post_attention_norm.weight"
    )
    assert gguf_name("model.layers.3.pre_feedforward_layernorm.weight", gemma) == "blk.3.ffn_norm.weight"
    assert gguf_name("model.layers.3.post_attention_layernorm.weight", llama) == "blk.3.ffn_norm.weight"


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_query_and_key_rows_are_put_back(num_kv_heads: int, tmp_path: Path) -> None:
    """A transformers Llama, its weights sent through a GGUF file, gives the very same logits; permuted rows do not."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": num_kv_heads, "attention_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    arch = architecture(
        "llama", num_key_value_heads=num_kv_heads, tie_word_embeddings=False, attention_bias=True
    )
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(12).view(1, -1)
    expected = model(ids).logits

    weights = open_weights(write_gguf(tmp_path / "m.gguf", arch, tensors), arch)
    model.load_state_dict(read_all(weights))
    assert torch.equal(model(ids).logits, expected)

    heads = {".q_proj.": SIZES["num_attention_heads"], ".k_proj.": num_kv_heads}
    for name in tensors:
        for part, num_heads in heads.items():
            if part in name:
                tensors[name] = permute(tensors[name], num_heads)
    model.load_state_dict(tensors)
    assert not torch.allclose(model(ids).logits, expected, atol=1e-2)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    """Llama whose query projections are packed, with biases and a key projection left dense."""
    arch = architecture("llama", attention_bias=True)
    types = {
        QUERY: PackageType.Q4_1,
        "model.layers.1.mlp.up_proj.weight": PackageType.Q8_0,
        KEY: PackageType.F16,
    }
    tensors = random_tensors(arch)
    tensors[KEY] = tensors[KEY].half()
    path = tmp_path_factory.mktemp("mixed") / "m.gguf"
    return open_weights(write_gguf(path, arch, tensors, types), arch)


@pytest.mark.parametrize(
    "rows", [slice(0, 32), slice(32, 96), slice(5, 41), slice(127, 128), slice(7, 7), slice(0, 128)]
)
@pytest.mark.parametrize("columns", [slice(0, 64), slice(32, 64), slice(3, 50), slice(40, 41)])
def test_slices_of_permuted_packed_rows(rows: slice, columns: slice, mixed: WeightSource) -> None:
    whole = mixed.get(QUERY).dequantize(torch.float32)
    data = mixed.get(QUERY, (rows, columns))
    assert data.shape == tuple(whole[rows, columns].shape)
    assert torch.equal(data.dequantize(torch.float32), whole[rows, columns])
    is_whole_blocks = columns.start % 32 == 0 and columns.stop % 32 == 0
    assert (data.packed is not None) == is_whole_blocks


@pytest.mark.parametrize(
    "name", [KEY, "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_slices_of_other_tensors(name: str, mixed: WeightSource) -> None:
    whole = mixed.get(name).dequantize(torch.float32)
    for rows in (slice(0, 10), slice(3, 64), slice(31, 33), slice(20, None)):
        assert torch.equal(mixed.get(name, (rows,)).dequantize(torch.float32), whole[rows])


def test_packed_blocks_stay_packed_and_only_the_slice_is_read(mixed: WeightSource) -> None:
    before = mixed.bytes_read
    data = mixed.get("model.layers.1.mlp.up_proj.weight", (slice(8, 24),))
    assert data.packed is not None and data.tensor is None
    assert data.packed.ggml_type == GGMLType.Q8_0 and data.packed.shape == (16, 64)
    assert data.packed.data.shape == (16, 2 * 34) and data.packed.data.dtype == torch.uint8
    assert mixed.bytes_read - before == 16 * 2 * 34
    expected = gguf.dequantize(data.packed.data.numpy(), PackageType.Q8_0)
    assert torch.equal(data.dequantize(torch.float32), torch.from_numpy(expected))


def test_dequantize_into_a_fused_buffer(mixed: WeightSource) -> None:
    names = [QUERY, "model.layers.1.self_attn.k_proj.weight"]
    buffer = torch.empty(128 + 64, 64, dtype=torch.bfloat16)
    mixed.get(names[0]).dequantize_into(buffer[:128])
    mixed.get(names[1]).dequantize_into(buffer[128:])
    expected = torch.cat([mixed.get(name).dequantize(torch.float32) for name in names])
    assert torch.equal(buffer, expected.bfloat16())


def test_errors_name_file_and_both_names(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf_bytes(
            tiny_llama(),
            [
                TensorSpec("blk.0.attn_q.weight", (32, 30)),
                TensorSpec("blk.0.ffn_up.weight", (32, 4), GGMLType.Q8_1),
            ],
        )
    )
    weights = GGUFSource.open(path, architecture("llama", hidden_size=32, head_dim=8))
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: .*q_proj\.weight' \(here 'blk\.0\.attn_q\.weight'\).*whole heads"
    ):
        weights.get("model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(
        UnsupportedModelError, match=r"m\.gguf: .*'blk\.0\.ffn_up\.weight'\) has type Q8_1.*known: F32"
    ):
        weights.get("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*\(here 'blk\.1\.ffn_up\.weight'\) is missing"):
        weights.get("model.layers.1.mlp.up_proj.weight")


def test_llama3_rope_factors_are_on_offer(tmp_path: Path) -> None:
    arch, factors = architecture("llama"), torch.rand(16)
    source = write_gguf(tmp_path / "m.gguf", arch, random_tensors(arch), extra={"rope_freqs.weight": factors})
    arch = load_architecture(source)
    assert arch.rope.scaling.factors_tensor == "rope_freqs.weight"
    weights = open_weights(source, arch)
    assert torch.equal(weights.get("rope_freqs.weight", shape=(16,)).dequantize(torch.float32), factors)


def test_gguf_and_folder_agree(tmp_path: Path) -> None:
    for name in CONFIGS:
        arch = architecture(name)
        tensors = random_tensors(arch)
        from_file = read_all(open_source(write_gguf(tmp_path / f"{name}.gguf", arch, tensors)))
        from_folder = read_all(open_source(write_folder(tmp_path / name, config(name), tensors)))
        assert from_file.keys() == from_folder.keys()
        for key, tensor in from_file.items():
            assert torch.equal(tensor, from_folder[key]), f"{name} {key}"
