"""Reads GGUF metadata into a ModelArchitecture."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from headrace.checkpoint.config_fields import ConfigFields
from headrace.checkpoint.gguf_file import GGUFTensor
from headrace.checkpoint.model_config import (
    MAX_LAYERS,
    ModelArchitecture,
    RopeConfig,
    RopeScaling,
    check_known,
    check_sizes,
)
from headrace.errors import UnsupportedModelError

# Not in the metadata of Gemma 3 files: every sixth layer has full attention, the others slide with their own rope
# base; the activation; and that the 27B model (62 layers) alone scales queries by hidden / heads.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_ROPE_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62

_TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>")


def read_gguf_config(
    metadata: Mapping[str, Any], tensor_names: Collection[str], where: str
) -> ModelArchitecture:
    """The architecture that ``metadata`` describes; errors name ``where`` and the key."""
    architecture = ConfigFields(metadata, where).text("general.architecture")
    check_known(architecture, where)
    fields = ConfigFields(_without_equal_lists(metadata, architecture), where, prefix=f"{architecture}.")
    if fields.size("expert_count", 0, minimum=0):
        raise UnsupportedModelError(f"{where}: '{architecture}' with experts is not supported")
    num_layers, hidden_size = fields.size("block_count"), fields.size("embedding_length")
    if num_layers > MAX_LAYERS:
        fields.fail("block_count", f"is {num_layers}, above the limit of {MAX_LAYERS}")
    num_heads = fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", max(hidden_size // num_heads, 1))
    is_gemma = architecture == "gemma3"
    bos, eos, pad = _special_ids(metadata, where)
    model = ModelArchitecture(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=fields.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("feed_forward_length"),
        vocab_size=_vocab_size(metadata, tensor_names, fields),
        max_position_embeddings=fields.size("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        hidden_act="gelu_pytorch_tanh" if is_gemma else "silu",
        tie_word_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        attention_output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        rope=_rope(fields, head_dim, tensor_names),
        local_rope_theta=fields.number("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_THETA) if is_gemma else None,
        layer_windows=_layer_windows(fields, is_gemma, num_layers),
        query_scale=_query_scale(is_gemma, num_layers, hidden_size, num_heads, head_dim),
        attn_logit_softcap=fields.optional_number("attn_logit_softcapping") if is_gemma else None,
        final_logit_softcap=fields.optional_number("final_logit_softcapping") if is_gemma else None,
        embedding_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        bos_token_id=bos,
        eos_token_ids=eos,
        pad_token_id=pad,
        torch_dtype=_stored_dtype(tensor_names),
        quantization={"quant_method": "gguf", "file_type": metadata.get("general.file_type")},
        raw={key: value for key, value in metadata.items() if isinstance(value, (str, int, float))},
    )
    return check_sizes(model, where)


def _without_equal_lists(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Per-layer lists whose items are all equal become that item; others stay and are refused as ill-typed."""
    prefix = f"{architecture}."
    return {
        key: value[0] if isinstance(value, tuple) and value and len(set(value)) == 1 else value
        for key, value in metadata.items()
        if key.startswith(prefix)
    }


def _stored_dtype(tensors: Collection[str]) -> str | None:
    """The type bfloat16 where every matrix is stored so: whoever made the file means it to be computed so."""
    if not isinstance(tensors, Mapping):
        return None
    types = {tensor.ggml_type.name for tensor in tensors.values() if len(tensor.shape) == 2}
    return "bfloat16" if types == {"BF16"} else None


def _vocab_size(metadata: Mapping[str, Any], tensor_names: Collection[str], fields: ConfigFields) -> int:
    """Rows of the embedding where its shape is at hand, else what the metadata says."""
    if isinstance(tensor_names, Mapping):
        embedding = tensor_names.get("token_embd.weight")
        if isinstance(embedding, GGUFTensor) and len(embedding.shape) == 2:
            return embedding.shape[0]
    tokens = metadata.get("tokenizer.ggml.tokens")
    return fields.size("vocab_size", len(tokens) if tokens is not None else None)


def _rope(fields: ConfigFields, head_dim: int, tensor_names: Collection[str]) -> RopeConfig:
    rotary_dim = fields.size("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{fields.where}: rotary embedding of {rotary_dim} of {head_dim} dimensions is not supported"
        )
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.text("rope.scaling.type", "linear" if fields.has("rope.scale_linear") else "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if "rope_freqs.weight" in tensor_names:
        return RopeConfig(theta, RopeScaling("llama3", factor=factor, factors_tensor="rope_freqs.weight"))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, RopeScaling("linear", factor=factor))
    if kind == "yarn":
        trained = fields.size("rope.scaling.original_context_length", fields.size("context_length"))
        return RopeConfig(
            theta,
            RopeScaling(
                "yarn",
                factor=factor,
                original_max_position_embeddings=trained,
                beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            ),
        )
    raise UnsupportedModelError(
        f"{fields.where}: rope scaling '{kind}' is not supported (known: none, linear, yarn)"
    )


def _layer_windows(fields: ConfigFields, is_gemma: bool, num_layers: int) -> tuple[int | None, ...]:
    window = fields.size("attention.sliding_window", 0, minimum=0) or None
    if not is_gemma:
        return (window,) * num_layers
    pattern = fields.size("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))


def _query_scale(is_gemma: bool, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> float:
    if is_gemma and num_layers == _GEMMA3_27B_LAYERS:
        return float((hidden_size // num_heads) ** -0.5)
    return float(head_dim**-0.5)


def _special_ids(metadata: Mapping[str, Any], where: str) -> tuple[int | None, tuple[int, ...], int | None]:
    """(bos, every eos, pad). A control token that ends turns in the chat template counts as an end, too."""
    fields = ConfigFields(metadata, where, prefix="tokenizer.")
    eos = dict.fromkeys(
        token_id
        for key in ("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id")
        for token_id in fields.token_ids(key)
    )
    template = fields.text("chat_template", "")
    ends = [text for text in _TURN_ENDS if text in template]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if ends and tokens is not None:
        texts = list(tokens)
        eos |= dict.fromkeys(texts.index(end) for end in ends if end in texts)
    bos, pad = fields.token_ids("ggml.bos_token_id"), fields.token_ids("ggml.padding_token_id")
    return (bos[0] if bos else None), tuple(eos), (pad[0] if pad else None)
