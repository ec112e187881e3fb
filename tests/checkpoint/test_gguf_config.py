"""ModelArchitecture.from_gguf on synthetic metadata and on the packaged models."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from typing import Any

import pytest

from headrace.checkpoint import ModelArchitecture, load_architecture, resolve_model
from headrace.checkpoint.gguf_file import GGUFTensor
from headrace.checkpoint.gguf_types import GGMLType
from headrace.checkpoint.model_config import RopeConfig, RopeScaling
from headrace.errors import CheckpointError, UnsupportedModelError

BASE = {
    "block_count": 3,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "vocab_size": 100,
}


def read(architecture: str, tensors: Collection[str] = (), **changes: Any) -> ModelArchitecture:
    metadata = {f"{architecture}.{key}": value for key, value in BASE.items()}
    metadata["general.architecture"] = architecture
    for key, value in changes.items():
        name = key.replace("__", ".")
        metadata[name if name.startswith(("tokenizer.", "general.")) else f"{architecture}.{name}"] = value
    return ModelArchitecture.from_gguf(metadata, tensors, where="m.gguf")


def test_llama() -> None:
    model = read("llama", ("output.weight",), rope__freq_base=5e5, rope__dimension_count=8)
    assert (model.num_layers, model.hidden_size, model.head_dim, model.num_kv_heads) == (3, 32, 8, 2)
    assert model.rope == RopeConfig(5e5)
    assert not model.tie_word_embeddings
    assert read("llama").tie_word_embeddings
    assert model.hidden_act == "silu"
    assert model.quantization == {"quant_method": "gguf", "file_type": None}
    assert read("llama", attention__sliding_window=16).layer_windows == (16, 16, 16)


def test_llama_3_factors_come_as_a_tensor() -> None:
    model = read("llama", ("rope_freqs.weight",))
    assert model.rope.scaling == RopeScaling("llama3", factors_tensor="rope_freqs.weight")


def test_rope_scalings() -> None:
    linear = read("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear.rope.scaling == RopeScaling("linear", factor=4.0)
    assert read("llama", rope__scale_linear=2.0).rope.scaling == RopeScaling("linear", factor=2.0)
    assert read("llama", rope__scaling__type="none").rope.scaling.kind == "none"
    yarn = read(
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
    )
    assert yarn.rope.scaling == RopeScaling("yarn", factor=4.0, original_max_position_embeddings=64)
    with pytest.raises(UnsupportedModelError, match="rope scaling 'longrope'"):
        read("llama", rope__scaling__type="longrope")
    with pytest.raises(UnsupportedModelError, match="rotary embedding of 4 of 8"):
        read("llama", rope__dimension_count=4)


def test_qwen() -> None:
    biased = read("qwen2", ("blk.0.attn_q.bias",))
    assert biased.attention_bias and not biased.attention_output_bias
    normed = read("qwen3", ("blk.0.attn_q_norm.weight",), attention__key_length=16)
    assert normed.qk_norm and normed.head_dim == 16 and not normed.attention_bias


def test_gemma3_fills_in_what_metadata_lacks() -> None:
    model = read("gemma3", ("blk.0.attn_q_norm.weight",), attention__sliding_window=32, block_count=7)
    assert model.layer_windows == (32, 32, 32, 32, 32, None, 32)
    assert model.local_rope_theta == 10_000.0
    assert model.hidden_act == "gelu_pytorch_tanh"
    assert model.embedding_scale == 32**0.5
    assert model.query_scale == 8**-0.5
    big = read(
        "gemma3", block_count=62, embedding_length=5376, attention__head_count=32, attention__key_length=128
    )
    assert big.query_scale == 168**-0.5


def test_ends_named_by_the_template_count() -> None:
    words = ("<eos>", "<end_of_turn>", "a")
    model = read(
        "gemma3",
        tokenizer__ggml__tokens=words,
        tokenizer__ggml__eos_token_id=0,
        tokenizer__chat_template="{{ m }}<end_of_turn>",
    )
    assert model.eos_token_ids == (0, 1)
    both = read("llama", tokenizer__ggml__eos_token_id=5, tokenizer__ggml__eot_token_id=6)
    assert both.eos_token_ids == (5, 6)


def test_per_layer_lists_must_agree() -> None:
    assert read("llama", attention__head_count_kv=(2, 2, 2)).num_kv_heads == 2
    with pytest.raises(CheckpointError, match=r"'llama\.attention\.head_count_kv' is"):
        read("llama", attention__head_count_kv=(2, 1, 2))


@pytest.mark.parametrize("key", [key for key in BASE if key not in ("attention.head_count_kv",)])
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"m.gguf: key 'llama.{key}' is missing"):
        read("llama", **{key.replace(".", "__"): None})


def test_refusals() -> None:
    with pytest.raises(UnsupportedModelError, match=r"architecture 'mamba' is not supported \(known: llama"):
        read("mamba")
    with pytest.raises(UnsupportedModelError, match="with experts"):
        read("llama", expert_count=8)
    with pytest.raises(CheckpointError, match=r"'general\.architecture' is missing"):
        ModelArchitecture.from_gguf({}, (), where="m.gguf")


@pytest.mark.parametrize(
    ("types", "expected"),
    [(("BF16", "BF16"), "bfloat16"), (("BF16", "Q8_0"), None), (("F16", "F16"), None), ((), None)],
)
def test_matrices_of_bf16_are_computed_so(types: tuple[str, ...], expected: str | None) -> None:
    """Norms are fp32 in every file; other types name no type to compute in."""
    tensors = {"output_norm.weight": GGUFTensor("output_norm.weight", (32,), GGMLType.F32, 0, 128)}
    for index, name in enumerate(types):
        tensor = GGUFTensor(f"blk.{index}.ffn_up.weight", (64, 32), GGMLType[name], 0, 4096)
        tensors[tensor.name] = tensor
    assert read("llama", tensors).torch_dtype == expected


def packaged(name: str) -> ModelArchitecture:
    try:
        return load_architecture(resolve_model(name))
    except CheckpointError:
        pytest.skip(f"the package of {name} is not installed")


def test_smollm2() -> None:
    model = packaged("smollm2")
    assert (model.architecture, model.hidden_size, model.num_layers, model.vocab_size) == (
        "llama",
        576,
        30,
        49152,
    )
    assert (model.num_attention_heads, model.num_kv_heads, model.head_dim) == (9, 3, 64)
    assert model.rope == RopeConfig(100_000.0)
    assert model.tie_word_embeddings
    assert (model.bos_token_id, model.eos_token_ids, model.pad_token_id) == (1, (2,), 2)
    assert model.max_context_tokens == 8192
    assert pickle.loads(pickle.dumps(model)) == model


def test_gemma3_270m() -> None:
    model = packaged("gemma3-270m")
    assert (model.hidden_size, model.num_layers, model.head_dim, model.num_kv_heads) == (640, 18, 256, 1)
    assert [layer for layer, window in enumerate(model.layer_windows) if window is None] == [5, 11, 17]
    assert model.query_scale == 256**-0.5
    assert model.qk_norm and model.tie_word_embeddings
