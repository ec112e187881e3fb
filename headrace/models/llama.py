"""Llama: SmolLM2, Llama 2 and 3 (with its rope scaling), and what shares the layer: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

import torch

from headrace.attention.metadata import ForwardBatch
from headrace.checkpoint.model_config import ModelArchitecture
from headrace.layers.attention import Attention, LayerCaches
from headrace.layers.context import LayerContext
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.models.causal_lm import CausalLM


class LlamaDecoderLayer:
    """Norm, attention, norm, gated MLP. Windows, biases and query-key norms are data of the architecture."""

    def __init__(
        self, arch: ModelArchitecture, ctx: LayerContext, layer_id: int, cos_sin: torch.Tensor
    ) -> None:
        prefix, size = f"model.layers.{layer_id}", arch.hidden_size
        self._is_first = layer_id == 0
        self._input_norm = RMSNorm(ctx, f"{prefix}.input_layernorm", size, arch.rms_norm_eps)
        self._attention = Attention(ctx, arch, layer_id, f"{prefix}.self_attn", cos_sin)
        self._post_norm = RMSNorm(ctx, f"{prefix}.post_attention_layernorm", size, arch.rms_norm_eps)
        self._mlp = GatedMLP(
            ctx, f"{prefix}.mlp", size, arch.intermediate_size, arch.hidden_act, arch.mlp_bias
        )

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """See ``DecoderLayer.forward``."""
        if self._is_first:
            self._input_norm(residual, hidden)
        else:
            self._input_norm.add(hidden, residual, hidden)
        self._attention(hidden, batch, hidden)
        self._post_norm.add(hidden, residual, hidden)
        self._mlp(hidden, hidden)

    def bind(self, caches: LayerCaches) -> None:
        """Use this KV cache from now on."""
        self._attention.bind(caches)


class LlamaForCausalLM(CausalLM):
    """Llama 2, Llama 3, SmolLM2."""

    def make_layer(self, arch: ModelArchitecture, ctx: LayerContext, layer_id: int) -> LlamaDecoderLayer:
        """Build layer ``layer_id`` from its weights."""
        return LlamaDecoderLayer(arch, ctx, layer_id, self.rotary_table(layer_id))
