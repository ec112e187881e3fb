"""What can be told of an impossible start before torch is imported and weights are read."""

from __future__ import annotations

from headrace.checkpoint import ModelArchitecture, load_architecture, resolve_model
from headrace.checkpoint.load import resolve_max_model_len
from headrace.checkpoint.source import is_hub_id
from headrace.config import EngineConfig
from headrace.config_checks import check_tier_layers
from headrace.loader.tensor_names import matrix_modules
from headrace.parallel.sizes import check_sizes
from headrace.quant.precision import Precision


def check_start(config: EngineConfig) -> None:
    """Check the settings against the model's own files. A hub model is left to the engine, which downloads it.

    Raises: CheckpointError, ConfigError, as the engine would later.
    """
    model = config.model
    if is_hub_id(model.model):
        Precision.parse(model.quantization, model.quantization_overrides)
    else:
        source = resolve_model(model.model, revision=model.revision)
        check_model(config, load_architecture(source), source.name)


def check_model(config: EngineConfig, architecture: ModelArchitecture, name: str) -> None:
    """All that settings and a model's description tell of a start that must fail. Raises ConfigError."""
    model = config.model
    precision = Precision.parse(model.quantization, model.quantization_overrides)
    for module in matrix_modules(architecture):
        precision.form_of(module)
    precision.check_overrides()
    check_sizes(architecture, config.parallel, name)
    resolve_max_model_len(model.max_model_len, architecture, model.model)
    check_tier_layers(config.sharing, architecture.layer_windows)
