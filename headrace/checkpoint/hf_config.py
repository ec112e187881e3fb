"""Reads a transformers config.json into a ModelArchitecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.checkpoint.config_fields import ConfigFields
from headrace.checkpoint.model_config import (
    MAX_LAYERS,
    ModelArchitecture,
    RopeConfig,
    RopeScaling,
    check_known,
    check_sizes,
)
from headrace.errors import CheckpointError, UnsupportedModelError

_MODEL_TYPES = {"gemma3_text": "gemma3"}
_ARCHITECTURE_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}

# What transformers' config classes assume for keys that a config.json leaves out (not for nulls, which mean "no
# window" or "derive it"). Sizes have no default but for Gemma 3, whose published configs rely on them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
}

_SHARED_WITH_TEXT = (
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "tie_word_embeddings",
)


def read_hf_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], where: str
) -> ModelArchitecture:
    """The architecture that ``config`` describes; errors name ``where`` and the key."""
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{where}: is not a JSON object")
    architecture = _architecture(config, where)
    text = _text_config(config, where)
    fields = ConfigFields(_DEFAULTS[architecture] | text, where)
    num_layers = fields.size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        fields.fail("num_hidden_layers", f"is {num_layers}, above the limit of {MAX_LAYERS}")
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", max(hidden_size // num_heads, 1))
    attention_bias = fields.flag("attention_bias", False) and architecture in ("llama", "qwen3", "gemma3")
    is_gemma = architecture == "gemma3"
    rope, local_rope_theta = _rope(fields, architecture)
    bos, eos, pad = _special_ids(fields, generation_config, where)
    quantization = fields.nested("quantization_config")
    model = ModelArchitecture(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        hidden_act=fields.text("hidden_activation" if is_gemma else "hidden_act", "silu"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias or architecture == "qwen2",
        attention_output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) and architecture == "llama",
        qk_norm=architecture in ("qwen3", "gemma3"),
        rope=rope,
        local_rope_theta=local_rope_theta,
        layer_windows=_layer_windows(fields, architecture, num_layers),
        query_scale=(fields.number("query_pre_attn_scalar") if is_gemma else head_dim) ** -0.5,
        attn_logit_softcap=fields.optional_number("attn_logit_softcapping") if is_gemma else None,
        final_logit_softcap=fields.optional_number("final_logit_softcapping") if is_gemma else None,
        embedding_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        bos_token_id=bos,
        eos_token_ids=eos,
        pad_token_id=pad,
        torch_dtype=_dtype_name(fields),
        quantization=dict(config.get("quantization_config") or {}) if quantization else None,
        raw=config,
    )
    return check_sizes(model, where)


def _architecture(config: Mapping[str, Any], where: str) -> str:
    """The known name for ``model_type`` (of the text part, where there is one), else for ``architectures``."""
    fields = ConfigFields(config, where)
    text = fields.nested("text_config")
    name = (text or fields).text("model_type", "") or fields.text("model_type", "")
    if not name:
        classes = fields.raw("architectures") or [""]
        first = classes[0] if isinstance(classes, list) and isinstance(classes[0], str) else ""
        if not first:
            fields.fail("model_type", "is missing, and so is 'architectures'")
        name = _ARCHITECTURE_CLASSES.get(first, first)
    name = _MODEL_TYPES.get(name, name)
    check_known(name, where)
    return name


def _text_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The language model's own config: the nested one, completed by keys that only the outer one has."""
    if ConfigFields(config, where).nested("text_config") is None:
        return dict(config)
    outer = {key: config[key] for key in _SHARED_WITH_TEXT if config.get(key) is not None}
    inner = config["text_config"].items()
    return outer | {key: value for key, value in inner if value is not None or key not in outer}


def _rope(fields: ConfigFields, architecture: str) -> tuple[RopeConfig, float | None]:
    """Both rotary settings, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    partial = fields.number("partial_rotary_factor", 1.0)
    theta = fields.number("rope_theta", 10_000.0)
    parameters = fields.nested("rope_scaling") or fields.nested("rope_parameters")
    if architecture != "gemma3":
        return _rope_config(parameters, theta, partial, fields), None
    local_theta = fields.number("rope_local_base_freq")
    if parameters is not None and (parameters.has("full_attention") or parameters.has("sliding_attention")):
        local = _rope_config(parameters.nested("sliding_attention"), local_theta, partial, fields)
        if local.scaling.kind != "none":
            raise UnsupportedModelError(f"{fields.where}: a scaled rope for sliding layers is not supported")
        return _rope_config(parameters.nested("full_attention"), theta, partial, fields), local.theta
    return _rope_config(parameters, theta, partial, fields), local_theta


def _rope_config(
    parameters: ConfigFields | None, theta: float, partial: float, fields: ConfigFields
) -> RopeConfig:
    if parameters is not None:
        theta = parameters.number("rope_theta", theta)
        partial = parameters.number("partial_rotary_factor", partial)
    if partial != 1.0:
        raise UnsupportedModelError(
            f"{fields.where}: partial_rotary_factor {partial} is not supported (only 1.0)"
        )
    return RopeConfig(theta, RopeScaling() if parameters is None else _rope_scaling(parameters, fields))


def _rope_scaling(parameters: ConfigFields, fields: ConfigFields) -> RopeScaling:
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor=parameters.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise UnsupportedModelError(
            f"{parameters.where}: rope scaling '{kind}' is not supported (known: default, linear, llama3, yarn)"
        )
    trained = parameters.size("original_max_position_embeddings", fields.size("max_position_embeddings"))
    if kind == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        if high <= low:
            parameters.fail("high_freq_factor", f"is {high}, which must be above low_freq_factor ({low})")
        return RopeScaling(
            "llama3",
            factor=parameters.number("factor"),
            original_max_position_embeddings=trained,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeScaling(
        "yarn",
        factor=parameters.number("factor", fields.size("max_position_embeddings") / trained),
        original_max_position_embeddings=trained,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
        attention_factor=parameters.optional_number("attention_factor"),
        mscale=parameters.number("mscale", 0.0, positive=False) or None,
        mscale_all_dim=parameters.number("mscale_all_dim", 0.0, positive=False) or None,
    )


def _layer_windows(fields: ConfigFields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "llama":
        return (None,) * num_layers
    window = fields.optional_size("sliding_window")
    if architecture == "mistral":
        return (window,) * num_layers
    if architecture in ("qwen2", "qwen3") and not fields.flag("use_sliding_window", False):
        window = None
    if architecture == "gemma3" and fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{fields.where}: use_bidirectional_attention is not supported")
    if fields.has("layer_types"):
        return _windows_from_types(fields, window, num_layers)
    if architecture == "gemma3":
        pattern = fields.size("sliding_window_pattern", 6)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    first_sliding = fields.size("max_window_layers", num_layers, minimum=0)
    return tuple(window if layer >= first_sliding else None for layer in range(num_layers))


def _windows_from_types(fields: ConfigFields, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    types = fields.raw("layer_types")
    if not isinstance(types, (list, tuple)) or len(types) != num_layers:
        fields.fail("layer_types", f"is not a list of {num_layers} layer types")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{fields.where}: layer type {kind!r} is not supported (known: full_attention, sliding_attention)"
            )
    if window is None and "sliding_attention" in types:
        fields.fail("sliding_window", "is missing, but some layers are 'sliding_attention'")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _special_ids(
    fields: ConfigFields, generation_config: Mapping[str, Any], where: str
) -> tuple[int | None, tuple[int, ...], int | None]:
    """(bos, every eos, pad); generation_config.json comes first, since it is what the model is run with."""
    generation = ConfigFields(generation_config, where.replace("config.json", "generation_config.json"))
    eos = dict.fromkeys(generation.token_ids("eos_token_id") + fields.token_ids("eos_token_id"))
    bos = generation.token_ids("bos_token_id") or fields.token_ids("bos_token_id")
    pad = generation.token_ids("pad_token_id") or fields.token_ids("pad_token_id")
    return (bos[0] if bos else None), tuple(eos), (pad[0] if pad else None)


def _dtype_name(fields: ConfigFields) -> str | None:
    name = fields.text("dtype", fields.text("torch_dtype", ""))
    return name.removeprefix("torch.") or None
