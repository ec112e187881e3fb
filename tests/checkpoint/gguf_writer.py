"""Writes small GGUF files for tests, right ones and wrong ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.checkpoint.gguf_types import BLOCK_SIZES, GGMLType, ValueType


@dataclass(frozen=True)
class Raw:
    """A metadata value given as its type number and its bytes."""

    value_type: int
    data: bytes


@dataclass(frozen=True)
class TensorSpec:
    """An index entry; ``dims`` is in file order (fastest first), ``offset`` None means the next aligned place."""

    name: str
    dims: tuple[int, ...]
    ggml_type: int = GGMLType.F32
    offset: int | None = None
    data: bytes | None = None


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Any) -> tuple[int, bytes]:
    if isinstance(value, Raw):
        return value.value_type, value.data
    if isinstance(value, bool):
        return ValueType.BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return (ValueType.UINT32 if value >= 0 else ValueType.INT32), struct.pack(
            "<i" if value < 0 else "<I", value
        )
    if isinstance(value, float):
        return ValueType.FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return ValueType.STRING, string(value)
    items = [value_bytes(item) for item in value]
    item_type = items[0][0] if items else ValueType.INT32
    assert all(kind == item_type for kind, _ in items), "mixed array"
    return ValueType.ARRAY, struct.pack("<IQ", item_type, len(items)) + b"".join(data for _, data in items)


def num_bytes(spec: TensorSpec) -> int:
    block, size = BLOCK_SIZES[GGMLType(spec.ggml_type)]
    total = spec.dims[0] // block * size
    for dim in spec.dims[1:]:
        total *= dim
    return total


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Sequence[TensorSpec] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    out = [magic, struct.pack("<I", version)]
    out.append(
        struct.pack(
            "<QQ",
            len(tensors) if num_tensors is None else num_tensors,
            len(pairs) if num_keys is None else num_keys,
        )
    )
    for key, value in pairs:
        kind, data = value_bytes(value)
        out.append(string(key) + struct.pack("<I", kind) + data)
    body = b""
    for spec in tensors:
        offset = -(-len(body) // alignment) * alignment if spec.offset is None else spec.offset
        out.append(string(spec.name) + struct.pack("<I", len(spec.dims)))
        out.append(
            struct.pack(f"<{len(spec.dims)}Q", *spec.dims) + struct.pack("<IQ", spec.ggml_type, offset)
        )
        if spec.offset is None:
            size = num_bytes(spec)
            data = spec.data if spec.data is not None else bytes(range(256)) * (size // 256 + 1)
            body = body.ljust(offset, b"\0") + data[:size]
    header = b"".join(out)
    if tensors:
        header = header.ljust(-(-len(header) // alignment) * alignment, b"\0")
    return header + body


def tiny_llama(**changes: Any) -> dict[str, Any]:
    """Metadata of a small Llama with a byte-level vocabulary; ``changes`` replace keys (dots as double underscores),
    None removes one."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "ab", "c", "Ġ"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            metadata.pop(key)
        else:
            metadata[key] = value
    return metadata


TINY_TENSORS = (
    TensorSpec("token_embd.weight", (32, 6)),
    TensorSpec("blk.0.attn_q.weight", (32, 32), GGMLType.Q8_0),
    TensorSpec("blk.0.attn_norm.weight", (32,)),
    TensorSpec("blk.1.ffn_up.weight", (32, 64), GGMLType.Q4_1),
)
