"""What lies on disk: finding a model, its architecture, and its tensors as bytes. No torch, no numpy.

Public names load on first use, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.checkpoint.gguf_file import GGUFFile, GGUFTensor
    from headrace.checkpoint.load import load_architecture
    from headrace.checkpoint.model_config import ModelArchitecture, RopeConfig, RopeScaling
    from headrace.checkpoint.safetensors_index import SafetensorsIndex
    from headrace.checkpoint.source import ModelSource, resolve_model

_HOMES = {
    "GGUFFile": "gguf_file",
    "GGUFTensor": "gguf_file",
    "ModelArchitecture": "model_config",
    "ModelSource": "source",
    "RopeConfig": "model_config",
    "RopeScaling": "model_config",
    "SafetensorsIndex": "safetensors_index",
    "load_architecture": "load",
    "resolve_model": "source",
}

__all__ = [
    "GGUFFile",
    "GGUFTensor",
    "ModelArchitecture",
    "ModelSource",
    "RopeConfig",
    "RopeScaling",
    "SafetensorsIndex",
    "load_architecture",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
