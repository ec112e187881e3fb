"""Small vocabularies for tests, as GGUF metadata."""

from __future__ import annotations

from typing import Any

from headrace.tokenizer.byte_alphabet import BYTE_TO_CHAR


def byte_level(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """Every byte, a few merges, three control tokens and one that a user defined."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "Ã ©", "Ġ Ġ"]
    tokens = [
        "<|s|>",
        "<|end|>",
        "<|pad|>",
        "<mark>",
        *BYTE_TO_CHAR,
        *(merge.replace(" ", "") for merge in merges),
    ]
    types = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
    }
    return with_changes(metadata, changes)


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Unknown, start and end, bytes, letters and some words, two user-defined runs."""
    words = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "▁h",
        "el",
        "ll",
        "lo",
        "▁he",
        "hel",
        "llo",
        "▁hel",
        "▁hello",
        "▁w",
    ]
    marked = ["\n\n", "  "]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *marked]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words) + [4] * len(marked)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [0.0] * len(marked)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return with_changes(metadata, changes)


def with_changes(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Replaces ``tokenizer.ggml.`` keys; None removes one."""
    for name, value in changes.items():
        key = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        if value is None:
            metadata.pop(key)
        else:
            metadata[key] = value
    return metadata
