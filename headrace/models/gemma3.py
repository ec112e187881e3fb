"""Gemma 3 (text): norms on both sides of attention and MLP, local and global layers with a rope base each."""

from __future__ import annotations

import torch

from headrace.attention.metadata import ForwardBatch
from headrace.checkpoint.model_config import ModelArchitecture
from headrace.layers.attention import Attention, LayerCaches
from headrace.layers.context import LayerContext
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.models.causal_lm import CausalLM


class Gemma3DecoderLayer:
    """Each block's output is normed before it joins the residual stream."""

    def __init__(
        self, arch: ModelArchitecture, ctx: LayerContext, layer_id: int, cos_sin: torch.Tensor
    ) -> None:
        prefix, size, eps = f"model.layers.{layer_id}", arch.hidden_size, arch.rms_norm_eps
        self._is_first = layer_id == 0
        self._input_norm = RMSNorm(ctx, f"{prefix}.input_layernorm", size, eps)
        self._attention = Attention(ctx, arch, layer_id, f"{prefix}.self_attn", cos_sin)
        self._post_attention_norm = RMSNorm(ctx, f"{prefix}.post_attention_layernorm", size, eps)
        self._pre_mlp_norm = RMSNorm(ctx, f"{prefix}.pre_feedforward_layernorm", size, eps)
        self._mlp = GatedMLP(
            ctx, f"{prefix}.mlp", size, arch.intermediate_size, arch.hidden_act, arch.mlp_bias
        )
        self._post_mlp_norm = RMSNorm(ctx, f"{prefix}.post_feedforward_layernorm", size, eps)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """See ``DecoderLayer.forward``."""
        if self._is_first:
            self._input_norm(residual, hidden)
        else:
            self._input_norm.add(hidden, residual, hidden)
        self._attention(hidden, batch, hidden)
        self._post_attention_norm(hidden, hidden)
        self._pre_mlp_norm.add(hidden, residual, hidden)
        self._mlp(hidden, hidden)
        self._post_mlp_norm(hidden, hidden)

    def bind(self, caches: LayerCaches) -> None:
        """Use this KV cache from now on."""
        self._attention.bind(caches)


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3's language model; the sliding pattern, both rope bases and all scales are in the architecture."""

    def make_layer(self, arch: ModelArchitecture, ctx: LayerContext, layer_id: int) -> Gemma3DecoderLayer:
        """Build layer ``layer_id`` from its weights."""
        return Gemma3DecoderLayer(arch, ctx, layer_id, self.rotary_table(layer_id))
