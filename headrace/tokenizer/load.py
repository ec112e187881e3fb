"""load_tokenizer: the tokenizer that belongs to a ModelSource."""

from __future__ import annotations

from headrace.checkpoint.gguf_file import GGUFFile
from headrace.checkpoint.source import ModelSource
from headrace.tokenizer.base import Tokenizer


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Reads the tokenizer from GGUF metadata or from a Hugging Face folder.

    Raises:
        CheckpointError: its files are missing or wrong, or of a kind that is not supported.
    """
    if source.kind == "gguf":
        from headrace.tokenizer.gguf import load_gguf_tokenizer

        return load_gguf_tokenizer(GGUFFile.open(source.path))
    from headrace.tokenizer.hf import load_hf_tokenizer

    return load_hf_tokenizer(source.path)
