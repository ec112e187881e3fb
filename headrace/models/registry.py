"""Which class runs an architecture. Modules are imported when they are needed."""

from __future__ import annotations

import importlib

from headrace.checkpoint.model_config import ModelArchitecture
from headrace.errors import UnsupportedModelError
from headrace.layers.context import LayerContext
from headrace.models.causal_lm import CausalLM

MODELS = {
    "llama": "headrace.models.llama:LlamaForCausalLM",
    "mistral": "headrace.models.mistral:MistralForCausalLM",
    "qwen2": "headrace.models.qwen2:Qwen2ForCausalLM",
    "qwen3": "headrace.models.qwen3:Qwen3ForCausalLM",
    "gemma3": "headrace.models.gemma3:Gemma3ForCausalLM",
}


def build_model(arch: ModelArchitecture, ctx: LayerContext) -> CausalLM:
    """Construct the model, reading its weights from ``ctx.weights``.

    Raises:
        UnsupportedModelError: no model file has that name; the message lists those that exist.
        CheckpointError: a tensor is missing or has the wrong shape.
    """
    if arch.architecture not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise UnsupportedModelError(f"architecture {arch.architecture!r} is not supported (known: {known})")
    module, _, name = MODELS[arch.architecture].partition(":")
    model: CausalLM = getattr(importlib.import_module(module), name)(arch, ctx)
    ctx.weights.finish(is_whole=ctx.stage.num_stages == 1)
    return model
