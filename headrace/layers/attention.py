"""Attention: the block between two points of the residual stream, over the paged KV cache."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headrace.attention.metadata import ForwardBatch
from headrace.checkpoint.model_config import ModelArchitecture
from headrace.layers.context import LayerContext
from headrace.layers.linear import QKVParallelLinear, RowParallelLinear
from headrace.layers.norm import load_norm_weight


class LayerCaches(Protocol):
    """What attention layers need of the KV cache (``runtime/kv_cache.py``)."""

    def layer_group(self, layer_id: int) -> int:
        """Which entry of ``ForwardBatch.groups`` belongs to the layer."""

    def layer_views(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """(k, v), each [num_blocks, K, B, D], strided over blocks."""


class Attention:
    """Projections, optional query and key norms, rotary embedding, attention, output projection.

    Args:
        ctx: what layers are built from.
        arch: heads, biases, query-key norms, scale and soft cap.
        layer_id: number of the layer, by which the KV cache knows it.
        name: the module of the checkpoint.
        cos_sin: [P, D] rotary table.
    """

    def __init__(
        self, ctx: LayerContext, arch: ModelArchitecture, layer_id: int, name: str, cos_sin: Tensor
    ) -> None:
        self._ops = ctx.ops
        self._layer_id = layer_id
        self._cos_sin = cos_sin
        self._eps = arch.rms_norm_eps
        self._scale, self._soft_cap = arch.query_scale, arch.attn_logit_softcap
        self._q_norm = self._k_norm = None
        if arch.qk_norm:
            self._q_norm = load_norm_weight(ctx, f"{name}.q_norm", arch.head_dim)
            self._k_norm = load_norm_weight(ctx, f"{name}.k_norm", arch.head_dim)
        heads, kv_heads, head_dim = arch.num_attention_heads, arch.num_kv_heads, arch.head_dim
        self._qkv = QKVParallelLinear(
            ctx, name, arch.hidden_size, heads, kv_heads, head_dim, has_bias=arch.attention_bias
        )
        self._output = RowParallelLinear(
            ctx, f"{name}.o_proj", heads * head_dim, arch.hidden_size, has_bias=arch.attention_output_bias
        )
        query_share = ctx.parallel.share(heads, "attention heads")
        kv_share = ctx.parallel.kv_share(kv_heads)
        self._heads = (query_share.stop - query_share.start, kv_share.stop - kv_share.start, head_dim)
        self._projected = ctx.buffer("qkv", self._qkv.num_outputs)
        self._attended = ctx.buffer("attended", self._heads[0] * head_dim)

    def bind(self, caches: LayerCaches) -> None:
        """Takes the layer's views of the cache, before the first call."""
        self._group = caches.layer_group(self._layer_id)
        self._k_cache, self._v_cache = caches.layer_views(self._layer_id)

    def __call__(self, x: Tensor, batch: ForwardBatch, out: Tensor) -> None:
        """x, out: [T, E], may be the same; the keys and values of ``batch`` enter the cache."""
        group, num_tokens = batch.groups[self._group], batch.num_tokens
        qkv, attended = self._projected.rows(num_tokens), self._attended.rows(num_tokens)
        self._qkv(x, qkv)
        self._ops.rope_and_store(
            qkv,
            self._q_norm,
            self._k_norm,
            self._eps,
            self._cos_sin,
            batch.positions,
            group.slot_mapping,
            self._k_cache,
            self._v_cache,
            *self._heads,
        )
        self._ops.attention(
            qkv, self._k_cache, self._v_cache, group.plan, attended, *self._heads, self._scale, self._soft_cap
        )
        self._output(attended, out)
