"""A model's tokens as grammars see them, read from its files."""

from __future__ import annotations

from headrace.checkpoint import load_architecture, resolve_model
from headrace.config import ModelConfig
from headrace.engine.front_end import end_token_ids, open_tokenizer
from headrace.grammar.base import TokenVocabulary
from headrace.tokenizer import Tokenizer


def load_grammar_vocabulary(config: ModelConfig) -> TokenVocabulary:
    """Read the tokenizer of a model. Raises CheckpointError."""
    source = resolve_model(config.model, revision=config.revision)
    architecture = load_architecture(source)
    tokenizer = open_tokenizer(config, source)
    return grammar_vocabulary(tokenizer, architecture.vocab_size, end_token_ids(architecture, tokenizer))


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int, end_ids: list[int]) -> TokenVocabulary:
    """The tokens of a tokenizer, as many as the model has logits."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return TokenVocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(vocab_size)],
        special_ids=frozenset(token for token in tokenizer.special_ids if token < vocab_size),
        end_ids=tuple(end_ids),
        encode=encode,
    )
