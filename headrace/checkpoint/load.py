"""load_architecture: reads what a ModelSource's own files say about the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.checkpoint.gguf_file import GGUFFile
from headrace.checkpoint.model_config import ModelArchitecture
from headrace.checkpoint.source import ModelSource
from headrace.errors import CheckpointError, ConfigError


def load_architecture(source: ModelSource) -> ModelArchitecture:
    """The model's architecture, from config.json (and generation_config.json) or from GGUF metadata.

    Raises:
        CheckpointError: a file is missing or wrong, or the architecture is unknown.
    """
    if source.kind == "gguf":
        file = GGUFFile.open(source.path)
        return ModelArchitecture.from_gguf(file.metadata, file.tensors, where=str(source.path))
    config = read_json_object(source.path / "config.json")
    generation_path = source.path / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.is_file() else None
    return ModelArchitecture.from_hf_config(
        config, generation_config=generation, where=str(source.path / "config.json")
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file whose top is an object.

    Raises:
        CheckpointError: it is missing or something else.
    """
    try:
        value: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return value


def resolve_max_model_len(requested: int | None, architecture: ModelArchitecture, model: str) -> int:
    """The longest prompt plus answer, in tokens: what was asked for, or the model's own context.

    Raises:
        ConfigError: more is asked for than the model was made for.
    """
    own = architecture.max_context_tokens
    if requested is not None and requested > own:
        raise ConfigError(f"max_model_len is {requested}, but {model!r} was made for {own} tokens; lower it")
    return requested or own
