"""ModelArchitecture: what a decoder-only model is made of, whatever file it came from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import CheckpointError, UnsupportedModelError

KNOWN_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
MAX_LAYERS = 4096

RopeScalingKind = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length. Fields that a kind does not use are unset.

    Attributes:
        kind: ``none``; ``linear`` (frequencies divided by ``factor``); ``llama3`` (low frequencies divided, a smooth
            ramp between); ``yarn`` (ramp by number of rotations, cos and sin times the attention factor).
        factor: the stretch.
        original_max_position_embeddings: the trained length, tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: the ends of llama3's ramp.
        beta_fast, beta_slow, truncate: the ends of yarn's ramp, and whether they are rounded outwards.
        attention_factor: yarn's multiplier of cos and sin; None: derived from ``factor`` (``mscale`` fields if set).
        factors_tensor: a tensor [head_dim / 2] fp32 that holds the divisors of the frequencies ready made (GGUF
            files of Llama 3 have ``rope_freqs.weight``); with it the other fields are not needed.
    """

    kind: RopeScalingKind = "none"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    factors_tensor: str | None = None


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding over the whole head: base ``theta`` and its scaling."""

    theta: float
    scaling: RopeScaling = RopeScaling()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """A decoder-only model, independent of how it is stored. Sizes count elements, lengths count tokens.

    Attributes:
        architecture: the model file that runs it, one of ``KNOWN_ARCHITECTURES``.
        attention_bias: whether the query, key and value projections have a bias.
        attention_output_bias: whether the attention's output projection has one.
        mlp_bias: whether the MLP's projections have one.
        qk_norm: whether queries and keys are RMS-normalised per head.
        rope: rotary embedding of full-attention layers (of all layers where ``local_rope_theta`` is None).
        local_rope_theta: unscaled base for sliding layers (Gemma 3), or None.
        layer_windows: per layer the sliding window, in tokens and counting the token itself, or None for full
            attention.
        query_scale: what attention scores are multiplied with before softmax.
        attn_logit_softcap, final_logit_softcap: tanh caps, or None.
        embedding_scale: multiplier of token embeddings.
        eos_token_ids: every id that ends an answer, the main one first.
        torch_dtype: name of the stored dtype ("bfloat16"), or None when the file mixes types.
        quantization: the checkpoint's own description of its quantization (HF ``quantization_config``; for GGUF
            ``{"quant_method": "gguf", …}``), or None.
        raw: the original config, as read (of GGUF metadata: all but the arrays).
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    local_rope_theta: float | None
    layer_windows: tuple[int | None, ...]
    query_scale: float
    attn_logit_softcap: float | None
    final_logit_softcap: float | None
    embedding_scale: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    torch_dtype: str | None
    quantization: Mapping[str, Any] | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def max_context_tokens(self) -> int:
        """The longest context the file vouches for: with YaRN the stretched length, else max_position_embeddings."""
        scaling = self.rope.scaling
        if scaling.kind == "yarn" and scaling.original_max_position_embeddings:
            stretched = int(scaling.original_max_position_embeddings * scaling.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        *,
        generation_config: Mapping[str, Any] | None = None,
        where: str = "config.json",
    ) -> ModelArchitecture:
        """From a transformers ``config.json`` (and ``generation_config.json``, for its end-of-text ids).

        Raises:
            UnsupportedModelError: an unknown architecture or a feature that would compute something else.
            CheckpointError: a missing or ill-typed field; the message names ``where`` and the key.
        """
        from headrace.checkpoint.hf_config import read_hf_config

        return read_hf_config(config, generation_config or {}, where)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_names: Collection[str], *, where: str = "GGUF metadata"
    ) -> ModelArchitecture:
        """From GGUF metadata. ``tensor_names`` may be ``GGUFFile.tensors``, whose shapes then give the vocabulary.

        Raises:
            UnsupportedModelError: an unknown architecture or a feature that would compute something else.
            CheckpointError: a missing or ill-typed key; the message names ``where`` and the key.
        """
        from headrace.checkpoint.gguf_config import read_gguf_config

        return read_gguf_config(metadata, tensor_names, where)


def check_known(architecture: str, where: str) -> None:
    """Raises UnsupportedModelError, listing the known ones, for an architecture that Headrace does not run."""
    if architecture not in KNOWN_ARCHITECTURES:
        known = ", ".join(KNOWN_ARCHITECTURES)
        raise UnsupportedModelError(
            f"{where}: architecture '{architecture}' is not supported (known: {known})"
        )


def check_sizes(model: ModelArchitecture, where: str) -> ModelArchitecture:
    """Raises CheckpointError when sizes contradict each other."""
    heads, kv_heads = model.num_attention_heads, model.num_kv_heads
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: {heads} attention heads cannot be shared out among {kv_heads} KV heads"
        )
    if model.head_dim % 2:
        raise CheckpointError(
            f"{where}: a head dimension of {model.head_dim} is odd; rotary embedding needs pairs"
        )
    if len(model.layer_windows) != model.num_layers:
        raise CheckpointError(
            f"{where}: {len(model.layer_windows)} layer types for {model.num_layers} layers"
        )
    return model
