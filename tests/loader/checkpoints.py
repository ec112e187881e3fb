"""Tiny checkpoints of every architecture, written as Hugging Face folders and as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.checkpoint.load import load_architecture
from headrace.checkpoint.model_config import ModelArchitecture
from headrace.checkpoint.source import ModelSource
from headrace.loader.base import WeightSource, open_weights
from headrace.loader.tensor_names import expected_tensors, is_norm

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": True},
    "mistral": {"hidden_act": "silu", "rope_theta": 10000.0, "sliding_window": 8},
    "qwen2": {"hidden_act": "silu", "rope_theta": 10000.0},
    "qwen3": {"hidden_act": "silu", "rope_theta": 10000.0, "attention_bias": False},
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
    },
}


def config(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": architecture} | SIZES | CONFIGS[architecture] | changes


def architecture(name: str, **changes: Any) -> ModelArchitecture:
    return ModelArchitecture.from_hf_config(config(name, **changes))


def random_tensors(
    arch: ModelArchitecture, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Every tensor of the architecture as Hugging Face stores it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in expected_tensors(arch).items()
    }


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelSource:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return ModelSource("hf", folder, folder.name)


def permute(tensor: Tensor, num_heads: int) -> Tensor:
    """What llama.cpp's converter does to the query and key rows of llama-family models."""
    half = tensor.shape[0] // num_heads // 2
    return tensor.reshape(num_heads, 2, half, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def gguf_tensor_name(architecture: str, name: str) -> str:
    """By the ``gguf`` package's own table, but for its ambiguous norms."""
    package_type = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(package_type, SIZES["num_hidden_layers"])
    stem, _, kind = name.rpartition(".")
    found = table.get_name(stem)
    assert found is not None, name
    return f"{found}.{kind}"


def write_gguf(
    path: Path,
    arch: ModelArchitecture,
    tensors: Mapping[str, Tensor],
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Mapping[str, Tensor] | None = None,
) -> ModelSource:
    """Converts as llama.cpp does. ``tensors`` are Hugging Face's; ``types`` quantizes some, by Hugging Face name;
    ``extra`` tensors keep their names."""
    name = "llama" if arch.architecture == "mistral" else arch.architecture
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(arch.num_layers)
    writer.add_context_length(arch.max_position_embeddings)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_feed_forward_length(arch.intermediate_size)
    writer.add_head_count(arch.num_attention_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_layer_norm_rms_eps(arch.rms_norm_eps)
    writer.add_rope_freq_base(arch.rope.theta)
    writer.add_eos_token_id(1)
    if arch.architecture == "gemma3":
        writer.add_sliding_window(8)
    for hf_name, tensor in tensors.items():
        stored = tensor
        if name == "llama" and ".q_proj." in hf_name:
            stored = permute(tensor, arch.num_attention_heads)
        elif name == "llama" and ".k_proj." in hf_name:
            stored = permute(tensor, arch.num_kv_heads)
        elif name == "gemma3" and is_norm(hf_name):
            stored = tensor + 1
        data, kind = stored.numpy(), (types or {}).get(hf_name)
        if kind is not None:
            data = gguf.quantize(np.ascontiguousarray(data), kind)
        writer.add_tensor(gguf_tensor_name(name, hf_name), np.ascontiguousarray(data), raw_dtype=kind)
    for extra_name, tensor in (extra or {}).items():
        writer.add_tensor(extra_name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("gguf", path, path.stem)


def open_source(source: ModelSource) -> WeightSource:
    return open_weights(source, load_architecture(source))


def read_all(weights: WeightSource) -> dict[str, Tensor]:
    return {name: weights.get(name).dequantize(torch.float32) for name in weights.names()}
