"""What can be told of an impossible start before torch is imported and weights are read."""

from __future__ import annotations

from headrace.checkpoint import load_architecture, resolve_model
from headrace.checkpoint.load import resolve_max_model_len
from headrace.checkpoint.source import is_hub_id
from headrace.config import EngineConfig, ParallelConfig
from headrace.errors import ConfigError


def check_start(config: EngineConfig) -> None:
    """Check the settings against the model's own files. A hub model is left to the engine, which downloads it.

    Raises: CheckpointError, ConfigError, as the engine would later.
    """
    check_parallel(config.parallel)
    model = config.model
    if not is_hub_id(model.model):
        architecture = load_architecture(resolve_model(model.model, revision=model.revision))
        resolve_max_model_len(model.max_model_len, architecture, model.model)


def check_parallel(parallel: ParallelConfig) -> None:
    """The worker's own rule, told earlier. Raises ConfigError for more than one device."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(parallel, name)
        if size != 1:
            raise ConfigError(f"{name} is {size}, but this version runs on one device; set it to 1")
