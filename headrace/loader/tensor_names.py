"""Which tensors a decoder consists of, under Hugging Face's names, and what GGUF calls them.

Data for the sources: dummy weights are made from it, files are checked against it before anything is loaded.
"""

from __future__ import annotations

import math

from headrace.checkpoint.model_config import ModelArchitecture

Shape = tuple[int, ...]

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

_GGUF_TOP = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Gemma has a norm on each side of both blocks, so the one before the MLP gets a name of its own.
_GGUF_LAYER_GEMMA = _GGUF_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# Buffers and other models' parts that published checkpoints carry along.
_IGNORABLE_ENDINGS = (".rotary_emb.inv_freq", ".masked_bias", ".attn_rot_embd.weight")
_IGNORABLE_BEGINNINGS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_LANGUAGE_MODEL_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model."}


def expected_tensors(arch: ModelArchitecture) -> dict[str, Shape]:
    """Hugging Face name -> shape of every tensor that ``arch`` needs, in the order of the forward pass."""
    shapes: dict[str, Shape] = {EMBEDDING: (arch.vocab_size, arch.hidden_size)}
    layer = _layer_tensors(arch)
    for number in range(arch.num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes[FINAL_NORM] = (arch.hidden_size,)
    if not arch.tie_word_embeddings:
        shapes[HEAD] = (arch.vocab_size, arch.hidden_size)
    if arch.rope.scaling.factors_tensor is not None:
        shapes[arch.rope.scaling.factors_tensor] = (arch.head_dim // 2,)
    return shapes


def matrix_modules(arch: ModelArchitecture) -> list[str]:
    """Modules that hold a matrix, as settings name them: "model.layers.0.mlp.down_proj"."""
    ending = ".weight"
    return [
        name.removesuffix(ending)
        for name, shape in expected_tensors(arch).items()
        if len(shape) == 2 and name.endswith(ending)
    ]


def dense_bytes(arch: ModelArchitecture, itemsize: int) -> int:
    """Of all weights, at ``itemsize`` bytes a number."""
    return itemsize * sum(math.prod(shape) for shape in expected_tensors(arch).values())


def _layer_tensors(arch: ModelArchitecture) -> dict[str, Shape]:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    query, kv = arch.num_attention_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for name, rows, columns, has_bias in (
        ("self_attn.q_proj", query, hidden, arch.attention_bias),
        ("self_attn.k_proj", kv, hidden, arch.attention_bias),
        ("self_attn.v_proj", kv, hidden, arch.attention_bias),
        ("self_attn.o_proj", hidden, query, arch.attention_output_bias),
        ("mlp.gate_proj", inner, hidden, arch.mlp_bias),
        ("mlp.up_proj", inner, hidden, arch.mlp_bias),
        ("mlp.down_proj", hidden, inner, arch.mlp_bias),
    ):
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if arch.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (arch.head_dim,), "self_attn.k_norm.weight": (arch.head_dim,)}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if arch.architecture == "gemma3":
        shapes |= {
            "pre_feedforward_layernorm.weight": (hidden,),
            "post_feedforward_layernorm.weight": (hidden,),
        }
    return shapes


def is_norm(name: str) -> bool:
    """Whether a Hugging Face name is that of a norm's weight."""
    return name.endswith("norm.weight")


def is_ignorable(name: str, arch: ModelArchitecture) -> bool:
    """Whether a tensor that the model does not use is no reason to warn."""
    if name == HEAD:
        return arch.tie_word_embeddings
    return name.endswith(_IGNORABLE_ENDINGS) or name.startswith(_IGNORABLE_BEGINNINGS)


def gguf_name(name: str, arch: ModelArchitecture) -> str:
    """What a GGUF file calls the tensor with this Hugging Face name; names it does not translate stay."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    if not name.startswith("model.layers."):
        return name
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    names = _GGUF_LAYER_GEMMA if arch.architecture == "gemma3" else _GGUF_LAYER
    return f"blk.{number}.{names[part]}.{kind}" if part in names else name


def hf_name(stored: str, stored_names: frozenset[str]) -> str:
    """The canonical Hugging Face name of a tensor in a safetensors file.

    Multimodal checkpoints keep the language model under a prefix, and checkpoints of the bare decoder leave out
    ``model.``.
    """
    for prefix, canonical in _LANGUAGE_MODEL_PREFIXES.items():
        if stored.startswith(prefix):
            return canonical + stored.removeprefix(prefix)
    if stored == f"language_model.{HEAD}":
        return HEAD
    if "embed_tokens.weight" in stored_names and stored != HEAD:
        return f"model.{stored}"
    return stored
