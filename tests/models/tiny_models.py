"""Tiny random transformers models of every architecture, saved as Hugging Face folders."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

VOCAB_SIZE = 211


@dataclass(frozen=True)
class TinyModel:
    """config: changes to ``SIZES``; a head_dim of None: not mentioned. num_tokens: of the longest test sequence."""

    config_class: type[transformers.PreTrainedConfig]
    config: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 40

    def make(self, seed: int = 0) -> transformers.PreTrainedModel:
        """The model in fp32. Weights are drawn so that logits are spread over several units: no near ties."""
        settings = SIZES | self.config
        if settings["head_dim"] is None:
            del settings["head_dim"]
        attention = "capped" if settings.get("attn_logit_softcapping") else "eager"
        config = self.config_class(**settings)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                is_factor = name.endswith("norm.weight") and "gemma" not in config.model_type
                weight.data = values * 0.3 + (1.0 if is_factor else 0.0)
            else:
                weight.data = values * weight.shape[1] ** -0.5 * (1.0 if "lm_head" not in name else 3.0)
        return model.eval()


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def capped_attention(module: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' Gemma 3 carries attn_logit_softcapping but does not hand it to its attention."""
    return eager_attention_forward(module, *args, softcap=module.attn_logit_softcapping, **kwargs)


ALL_ATTENTION_FUNCTIONS.register("capped", capped_attention)
transformers.AttentionMaskInterface.register("capped", transformers.masking_utils.eager_mask)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA3: dict[str, Any] = {
    "sliding_window": 16,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
    "tie_word_embeddings": True,
}
GEMMA3["layer_types"] = GEMMA3["layer_types"][:5]

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel(transformers.LlamaConfig),
    "llama-tied": TinyModel(transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-heads-fill-width": TinyModel(transformers.LlamaConfig, {"head_dim": 12, "num_key_value_heads": 4}),
    "llama-biases": TinyModel(transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": TinyModel(transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}, num_tokens=120),
    "llama-linear-rope": TinyModel(
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}},
        num_tokens=80,
    ),
    "llama-yarn": TinyModel(transformers.LlamaConfig, {"rope_parameters": YARN_ROPE}, num_tokens=120),
    "mistral": TinyModel(transformers.MistralConfig, {"sliding_window": 16}, num_tokens=90),
    "mistral-no-window": TinyModel(transformers.MistralConfig, {"sliding_window": None}),
    "qwen2": TinyModel(transformers.Qwen2Config, {"head_dim": None}),
    "qwen2-sliding": TinyModel(
        transformers.Qwen2Config,
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        num_tokens=70,
    ),
    "qwen2-yarn": TinyModel(
        transformers.Qwen2Config,
        {"head_dim": None, "rope_parameters": YARN_ROPE | {"attention_factor": 1.3, "truncate": False}},
        num_tokens=100,
    ),
    "qwen3": TinyModel(transformers.Qwen3Config),
    "qwen3-biases": TinyModel(
        transformers.Qwen3Config, {"attention_bias": True, "tie_word_embeddings": True}
    ),
    "qwen3-sliding": TinyModel(
        transformers.Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
        num_tokens=70,
    ),
    "gemma3": TinyModel(transformers.Gemma3TextConfig, GEMMA3, num_tokens=90),
    "gemma3-capped": TinyModel(
        transformers.Gemma3TextConfig,
        GEMMA3 | {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 2.0},
        num_tokens=60,
    ),
    "gemma3-stretched": TinyModel(
        transformers.Gemma3TextConfig,
        GEMMA3
        | {
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        num_tokens=60,
    ),
}
ARCHITECTURES = ("llama", "mistral", "qwen2-sliding", "qwen3", "gemma3")
"""One model of each."""
