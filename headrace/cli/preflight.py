"""What can be told of an impossible start before torch is imported and weights are read."""

from __future__ import annotations

from headrace.checkpoint import load_architecture, resolve_model
from headrace.checkpoint.load import resolve_max_model_len
from headrace.checkpoint.source import is_hub_id
from headrace.config import EngineConfig
from headrace.parallel.sizes import check_sizes
from headrace.quant.precision import Precision


def check_start(config: EngineConfig) -> None:
    """Check the settings against the model's own files. A hub model is left to the engine, which downloads it.

    Raises: CheckpointError, ConfigError, as the engine would later.
    """
    model = config.model
    Precision.parse(model.quantization, model.quantization_overrides)
    if not is_hub_id(model.model):
        source = resolve_model(model.model, revision=model.revision)
        architecture = load_architecture(source)
        check_sizes(architecture, config.parallel, source.name)
        resolve_max_model_len(model.max_model_len, architecture, model.model)
