"""FrontEnd: what the user's side knows of a model. Read from its files in a moment, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint import ModelArchitecture, ModelSource, load_architecture, resolve_model
from headrace.checkpoint.load import resolve_max_model_len
from headrace.config import ModelConfig
from headrace.engine.input_processor import InputProcessor
from headrace.engine.output_processor import OutputProcessor
from headrace.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class FrontEnd:
    """The two ends of an engine: requests are checked on the way in, and become text on the way out.

    tokenizer: None with ``skip_tokenizer_init``.
    max_model_len: prompt plus answer, in tokens.
    """

    source: ModelSource
    architecture: ModelArchitecture
    tokenizer: Tokenizer | None
    max_model_len: int
    inputs: InputProcessor
    outputs: OutputProcessor

    @classmethod
    def open(cls, config: ModelConfig) -> FrontEnd:
        """Read a model's description and its tokenizer.

        Raises: CheckpointError for files that are missing or wrong; ConfigError for a context longer than the model's.
        """
        source = resolve_model(config.model, revision=config.revision)
        architecture = load_architecture(source)
        tokenizer = None if config.skip_tokenizer_init else open_tokenizer(config, source)
        max_model_len = resolve_max_model_len(config.max_model_len, architecture, config.model)
        inputs = InputProcessor(
            vocab_size=architecture.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=end_token_ids(architecture, tokenizer),
            tokenizer=tokenizer,
        )
        return cls(source, architecture, tokenizer, max_model_len, inputs, OutputProcessor(tokenizer))


def open_tokenizer(config: ModelConfig, source: ModelSource) -> Tokenizer:
    """The tokenizer named in the configuration, or the model's own. Raises CheckpointError."""
    if config.tokenizer is None:
        return load_tokenizer(source)
    folder = Path(config.tokenizer).expanduser()
    if (folder / "tokenizer.json").is_file():  # a tokenizer by itself, without a model's config.json
        return load_tokenizer(ModelSource("hf", folder, folder.name))
    return load_tokenizer(resolve_model(config.tokenizer))


def end_token_ids(architecture: ModelArchitecture, tokenizer: Tokenizer | None) -> list[int]:
    """The model's end-of-text ids, and the tokenizer's own when the model's files forget it."""
    ids = list(architecture.eos_token_ids)
    own = tokenizer.eos_token_id if tokenizer is not None else None
    is_missing = own is not None and own not in ids and own < architecture.vocab_size
    return [*ids, own] if is_missing and own is not None else ids
